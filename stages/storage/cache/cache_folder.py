"""The layout of a cache folder.

manifest.json                        written last; readers read only this
data/part-<unit>-<sha256>.parquet    shards, named by their content
rejected.parquet                     rows that could not be used, if there are any
_align/LOCK                          held by the owner of the folder
_align/outbox/<time>-<id>/           a run that a tracker was not sent all of, as a run_folder
_align/<plan key>/                   work in progress, removed when it is done
    plan.json  commits/<unit>.json  encoded/<slice>.json and .arrow  tmp/<run id>/

A cache whose --output is in a bucket is made in a local folder. The bucket gets the manifest, the
shards, the rejected rows and, until it is finished, the plan and the commits.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ....schemas.errors import StorageError, UsageError
from ..copies import work_folder
from ..disk import fs
from ..locations import is_remote

if TYPE_CHECKING:  # it imports numpy
    from ....schemas.cache import Commit
    from ..remote import Remote

PART_NAME = re.compile(r"part-[0-9]{8}-[0-9a-f]{16}\.parquet")
PLAN_NAME = "plan.json"
WORK_NAME = re.compile(r"[0-9a-f]{16}")


def part_name(unit: int, sha256: str) -> str:
    """The name of a file in `data`."""
    return f"part-{unit:08d}-{sha256[:16]}.parquet"


class Below:
    """A path in a folder, as an attribute of that folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: HasRoot, owner: type[object]) -> Path:
        return folder.root / self._name


class HasRoot(Protocol):
    """Something in a folder."""

    @property
    def root(self) -> Path:
        """The folder it is in."""
        ...


@dataclass(frozen=True)
class CacheFolder:
    """One cache in a folder; with a URL, one that is made there and pushed to a bucket."""

    root: Path
    url: str = ""

    manifest = Below("manifest.json")
    data = Below("data")
    rejected = Below("rejected.parquet")  # only there if rows could not be used
    private = Below("_align")
    lock = Below("_align/LOCK")
    outbox = Below("_align/outbox")  # only there if a tracker was not sent all of a run

    when_locked = "Wait for it, or choose another --output."

    @staticmethod
    def at(output: str) -> CacheFolder:
        """The folder that a cache is made in: its output, or one on this machine for a bucket."""
        return (
            CacheFolder(work_folder(output), output)
            if is_remote(output)
            else CacheFolder(Path(output))
        )

    def __str__(self) -> str:
        return self.url or str(self.root)

    def shown(self, path: Path) -> str:
        """A path of the cache as a user finds it."""
        return f"{self}/{self._name(path)}"

    def shard(self, entry: Commit) -> Path:
        """The path of a shard."""
        return self.data / entry.file

    def work(self, plan_key: str) -> WorkFolder:
        """The work in progress of one plan."""
        assert WORK_NAME.fullmatch(plan_key[:16]), plan_key
        return WorkFolder(self, self.private / plan_key[:16])

    def works(self) -> list[WorkFolder]:
        """The work in progress of every plan."""
        if not self.private.is_dir():
            return []
        names = sorted(path.name for path in self.private.iterdir())
        return [self.work(name) for name in names if WORK_NAME.fullmatch(name)]

    def prepare(self) -> None:
        """Makes the folders; refuses a folder that holds something else."""
        refuse_foreign(self.root, is_ours=self._is_ours, what="cache")
        if self.url:
            ours = {"manifest.json", "data", "rejected.parquet", "_align"}
            if foreign := {name.partition("/")[0] for name in self.remote.list()} - ours:
                raise UsageError(
                    f"{self} holds '{min(foreign)}' and is not a cache. Choose another --output."
                )
        make_place(self.root, self.private)
        fs.make_folder(self.data)
        fs.fsync_folder(self.root)

    def _is_ours(self) -> bool:
        is_run = (self.root / "checkpoints").exists()
        ours = self.private.is_dir() or (self.manifest.is_file() and self.data.is_dir())
        return ours and not (is_run or is_output(self.private))

    # The bucket

    @property
    def remote(self) -> Remote:
        """The place in the bucket; only a cache that is made in one has it."""
        from ..remote import Remote  # noqa: PLC0415 - its library takes a while to import

        return Remote(self.url)

    def push(self, path: Path) -> None:
        """Uploads a file of the cache."""
        self.remote.put(self._name(path), path)

    def share(self, path: Path) -> None:
        """Creates a record in the bucket; one that is there already replaces it here."""
        remote, name = self.remote, self._name(path)
        if remote.put_new(name, fs.read_bytes(path)):
            return
        first = remote.get(name)
        fs.unlink(path)
        if first is None:
            raise StorageError(f"{self.shown(path)} was removed. Run the same command again.")
        fs.publish(path, first)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


@dataclass(frozen=True)
class WorkFolder:
    """Everything one plan needs until its manifest is written."""

    cache: CacheFolder
    root: Path

    plan = Below(PLAN_NAME)
    commits = Below("commits")  # one file per finished unit
    encoded = Below("encoded")  # encoded slices of the data, each a file and its record

    @property
    def is_planned(self) -> bool:
        """Whether it has its plan, which is removed first: late commits may bring the rest back."""
        return self.plan.is_file()

    def commit(self, unit: int) -> Path:
        """The path of the commit of a unit."""
        return self.commits / f"{unit:08d}.json"

    def tmp(self, run_id: str) -> Path:
        """Drafts of one run."""
        return self.root / "tmp" / run_id

    def prepare(self) -> None:
        """Makes the folders; `cache.prepare()` must have been called."""
        fs.make_folder(self.root)
        fs.fsync_folder(self.root.parent)
        fs.make_folder(self.encoded)
        fs.make_folder(self.commits)
        fs.fsync_folder(self.root)

    def new_draft(self, run_id: str, name: str) -> Path:
        """A free name in the folder of one run's drafts."""
        return self.make_tmp(run_id) / f"{name}-{secrets.token_hex(8)}.parquet"

    def make_tmp(self, name: str) -> Path:
        """Makes a folder of drafts, which only its owner may read."""
        fs.make_folder(self.root / "tmp", 0o700)
        fs.make_folder(self.tmp(name), 0o700)
        return self.tmp(name)


OUTPUTS = ("rewards", "sweep", "samples", "judged", "selected", "rounds")
SCORES = "cache"  # the cache in the folder of rewards


@dataclass(frozen=True)
class OutputFolder:
    """The output of a command that makes neither a cache nor a run, with a mark in it."""

    root: Path
    kind: str  # one of OUTPUTS

    @property
    def _mark(self) -> Path:
        """The file with the digests of what align wrote under names that a person may use too."""
        return self.root / "_align" / self.kind

    def prepare(self) -> None:
        """Makes the folder; refuses one that holds something else."""
        private = self._mark.parent
        fs.drop_drafts(self._mark)  # a process that is killed as it writes the mark leaves one
        refuse_foreign(self.root, is_ours=self._is_ours, what=self.kind)
        make_place(self.root, private)
        if not self._mark.exists():
            fs.publish(self._mark, b"\n")  # no draft without content is dead

    def _is_ours(self) -> bool:
        """Whether it has the mark, or holds nothing yet but what another process begins with."""
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
        if path.exists() and fs.sha256_of(path) not in self._known():
            raise UsageError(
                f"{path} is not what align wrote there. Move it, or choose another --output."
            )

    def vouch_for(self, name: str, sha256: str) -> None:
        """Adds the digest of a file that is about to be written to that of the file it replaces."""
        path = self.root / name
        known = [fs.sha256_of(path)] if path.exists() else []
        fs.publish(self._mark, "\n".join([*known, sha256]).encode())

    def _known(self) -> list[str]:
        return fs.read_bytes(self._mark).decode("ascii", "replace").split()


def is_output(private: Path) -> bool:
    """Whether the folder is the output of another command."""
    return any((private / kind).exists() for kind in OUTPUTS)


def refuse_foreign(root: Path, *, is_ours: Callable[[], bool], what: str) -> None:
    """Refuses a folder with content that align did not make; an empty folder may be used.

    What the content is, is asked after it was seen: another process may begin just now.
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
    """Makes a folder and the private one in it, which marks it as made by align."""
    if not private.is_dir():
        above = [path for path in root.parents if not path.exists()]
        for path in (*reversed(above), root):
            fs.make_folder(path)
            if os.access(path.parent, os.R_OK):  # else this process may not sync it
                fs.fsync_folder(path.parent)
    fs.make_folder(private)
    fs.fsync_folder(root)  # before anything else is in it
