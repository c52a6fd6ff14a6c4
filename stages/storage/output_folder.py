"""The folder of a command's output, and the mark that align made it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...schemas.errors import UsageError
from .disk import fs

OUTPUTS = ("rewards", "sweep", "samples", "judged", "selected", "rounds")
SCORES = "cache"  # the cache inside a folder of rewards


def is_output(private: Path) -> bool:
    """Whether the folder is the output of a command that makes neither a cache nor a run."""
    return any((private / kind).exists() for kind in OUTPUTS)


def refuse_foreign(root: Path, *, is_ours: Callable[[], bool], what: str) -> None:
    """Refuses a folder with content that align did not make; an empty folder may be used.

    `is_ours` is called after content was seen, because another process may just have started.
    """
    if not root.exists():
        return
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder. Choose another --output.")
    if (found := next(root.iterdir(), None)) is not None and not is_ours():
        raise UsageError(
            f"{root} holds '{found.name}' and is not a {what} folder. Choose another --output."
        )


def make_place(root: Path, private: Path) -> None:
    """Makes a folder and its private folder, which marks it as made by align."""
    if not private.is_dir():
        above = [path for path in root.parents if not path.exists()]
        for path in (*reversed(above), root):
            fs.make_folder(path)
            if os.access(path.parent, os.R_OK):  # otherwise syncing is not permitted
                fs.fsync(path.parent)
    fs.make_folder(private)
    fs.fsync(root)  # before it gets other content


@dataclass(frozen=True)
class OutputFolder:
    """The marked output folder of a command that makes neither a cache nor a run."""

    root: Path
    kind: str  # one of OUTPUTS

    @property
    def _mark(self) -> Path:
        """The file with the digests of align's files whose names a user might use too."""
        return self.root / "_align" / self.kind

    def prepare(self) -> None:
        """Makes the folder; refuses one with other content."""
        fs.drop_drafts(self._mark)  # a process that is killed while writing the mark leaves one
        refuse_foreign(self.root, is_ours=self._is_ours, what=self.kind)
        make_place(self.root, self._mark.parent)
        if not self._mark.exists():
            fs.publish(self._mark, b"\n")  # not empty: an empty draft counts as alive

    def _is_ours(self) -> bool:
        """Whether the folder has the mark, or only the files another process starts with."""
        private = self._mark.parent
        if self._mark.is_file():
            return True
        begun = private.is_dir() and [*self.root.iterdir()] == [private]
        drafts = f".{self._mark.name}.*.tmp"
        is_empty = begun and all(path.match(drafts) for path in private.iterdir())
        return is_empty or self._mark.is_file()

    def require_ours(self, name: str) -> None:
        """Refuses to replace a file that align did not write, or that was changed since."""
        path = self.root / name
        known = fs.read_bytes(self._mark).decode("ascii", "replace").split()
        if path.exists() and fs.sha256_of(path) not in known:
            raise UsageError(
                f"{path} is not a file that align wrote. Move it, or choose another --output."
            )

    def vouch_for(self, name: str, sha256: str) -> None:
        """Adds the digest of a file that is about to be written; the replaced file's is kept."""
        path = self.root / name
        known = [fs.sha256_of(path)] if path.exists() else []
        fs.publish(self._mark, "\n".join([*known, sha256]).encode())
