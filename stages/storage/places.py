"""The folder a person names for output: made, unless it belongs to something else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.errors import UsageError
from . import fs

if TYPE_CHECKING:
    from pathlib import Path

OUTPUTS = ("rewards", "sweep")


@dataclass(frozen=True)
class OutputFolder:
    """Where a command that keeps neither cache nor run writes; known as ours by a mark in it."""

    root: Path
    kind: str  # one of OUTPUTS

    @property
    def _mark(self) -> Path:
        """Holds the digests of what we wrote under names a person may use as well."""
        return self.root / "_align" / self.kind

    def prepare(self) -> None:
        """Makes the folder; refuses one that holds something else."""
        private = self._mark.parent
        fs.drop_drafts(self._mark)  # a kill while it was marked leaves one
        is_begun = private.is_dir() and not any(private.iterdir())
        is_ours = self._mark.is_file() or (is_begun and [*self.root.iterdir()] == [private])
        refuse_foreign(self.root, is_ours=is_ours, what=self.kind)
        make_place(self.root, private)
        if not self._mark.exists():
            fs.publish(self._mark, b"", label="config")

    def require_ours(self, name: str) -> None:
        """Refuses to replace a file that we did not write, or that was changed since."""
        path = self.root / name
        if path.exists() and fs.sha256_of(path) not in self._known():
            raise UsageError(
                f"{path} is not what align wrote there. Move it, or choose another --output."
            )

    def vouch_for(self, name: str, sha256: str) -> None:
        """Writes down what is about to stand under a name, beside what stands there now."""
        path = self.root / name
        known = [fs.sha256_of(path)] if path.exists() else []
        fs.publish(self._mark, "\n".join([*known, sha256]).encode(), label="config")

    def _known(self) -> list[str]:
        return fs.read_bytes(self._mark).decode("ascii", "replace").split()


def is_output(private: Path) -> bool:
    """Whether a folder is that of another command."""
    return any((private / kind).exists() for kind in OUTPUTS)


def refuse_foreign(root: Path, *, is_ours: bool, what: str) -> None:
    """UsageError where something is that we did not make; an empty folder may be taken."""
    if not root.exists() and not root.is_symlink():
        return
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder. Choose another --output.")
    if not is_ours and (found := next(root.iterdir(), None)) is not None:
        raise UsageError(
            f"{root} belongs to something else: it holds '{found.name}' and no {what}. "
            "Choose another --output."
        )


def make_place(root: Path, private: Path) -> None:
    """Makes a folder and the private one in it, by which it is known as ours from then on."""
    if not private.is_dir():
        above = [path for path in root.parents if not path.exists()]
        for path in (*reversed(above), root):
            fs.make_folder(path)
            if os.access(path.parent, os.R_OK):  # else it is not ours to sync
                fs.fsync_folder(path.parent)
    fs.make_folder(private)
    fs.fsync_folder(root)  # before anything else is in it
