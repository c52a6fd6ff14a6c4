"""The layout of a cache folder.

manifest.json                        written last; readers read only this
data/part-<unit>-<sha256>.parquet    shards, named by their content
rejected.parquet                     rows that could not be used, if there are any
_align/LOCK                          held by the owner of the folder
_align/outbox/<time>-<id>/           a run that a tracker was not sent all of, as a run_folder
_align/<plan key>/                   work in progress, removed when it is done
    plan.json  commits/<unit>.json  encoded/<slice>.json and .arrow  tmp/<run id>/

Of a cache in an object store LOCK, outbox, encoded and tmp are in a local work folder.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from ....schemas.errors import UsageError
from ..bucket.objects import Location
from ..disk import fs
from ..store import Store, store_of

if TYPE_CHECKING:  # it imports numpy
    from ....schemas.cache import Commit, FileEntry

Root_co = TypeVar("Root_co", Path, Location, covariant=True)

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

    def __get__(self, folder: HasRoot[Root_co], owner: type[object]) -> Root_co:
        return folder.root / self._name


class HasRoot(Protocol[Root_co]):
    """Something in a folder or below a key."""

    @property
    def root(self) -> Root_co:
        """The folder it is in."""
        ...


@dataclass(frozen=True)
class CacheFolder:
    """One cache, on a disk or in an object store."""

    root: Location

    manifest = Below("manifest.json")
    data = Below("data")
    rejected = Below("rejected.parquet")  # only there if rows could not be used
    private = Below("_align")

    when_locked = "Wait for it, or choose another --output."

    @property
    def store(self) -> Store[Location]:
        """The operations on its files."""
        return store_of(self.root)

    @property
    def local(self) -> Path:
        """The folder of what needs a disk: the cache itself, or one beside the store."""
        return self.store.work_folder(self.root)

    @property
    def lock(self) -> Path:
        """Held by the owner of the folder, among the processes of a machine."""
        return self.local / "_align/LOCK"

    @property
    def outbox(self) -> Path:
        """Only there if a tracker was not sent all of a run."""
        return self.local / "_align/outbox"

    def shard(self, entry: Commit) -> Location:
        """The path of a shard; of an object with the bytes that it has to hold."""
        return self.store.pinned(self.data / entry.file, entry.sha256, entry.bytes)

    def pinned(self, entry: FileEntry) -> Location:
        """The path of another file of the manifest, likewise."""
        return self.store.pinned(self.root / entry.file, entry.sha256, entry.bytes)

    def work(self, plan_key: str) -> WorkFolder:
        """The work in progress of one plan."""
        assert WORK_NAME.fullmatch(plan_key[:16]), plan_key
        name = plan_key[:16]
        return WorkFolder(self, self.private / name, self.local / "_align" / name)

    def works(self) -> list[WorkFolder]:
        """The work in progress of every plan."""
        if not self.private.is_dir():
            return []
        names = [path.name for path in self.store.listed(self.private)]
        return [self.work(name) for name in names if WORK_NAME.fullmatch(name)]

    def prepare(self) -> None:
        """Makes the folders; refuses a folder that holds something else."""
        if self.store.has_folders:
            refuse_foreign(self.local, is_ours=self._is_ours, what="cache")
        else:
            _refuse_foreign_objects(
                self.root, {"manifest.json", "data", "rejected.parquet", "_align"}
            )
        make_place(self.local, self.local / "_align")
        self.store.make_folder(self.data)

    def _is_ours(self) -> bool:
        is_run = (self.root / "checkpoints").exists()
        ours = self.private.is_dir() or (self.manifest.is_file() and self.data.is_dir())
        return ours and not (is_run or is_output(self.local / "_align"))


@dataclass(frozen=True)
class WorkFolder:
    """Everything one plan needs until its manifest is written."""

    cache: CacheFolder
    root: Location
    local: Path  # what needs a disk; the root itself if that is on one

    plan = Below(PLAN_NAME)
    commits = Below("commits")  # one file per finished unit

    @property
    def is_planned(self) -> bool:
        """Whether it has its plan, which is removed first: late commits may bring the rest back."""
        return self.plan.is_file()

    @property
    def encoded(self) -> Path:
        """Encoded slices of the data, each a file and its record."""
        return self.local / "encoded"

    def commit(self, unit: int) -> Location:
        """The path of the commit of a unit."""
        return self.commits / f"{unit:08d}.json"

    def tmp(self, run_id: str) -> Path:
        """Drafts of one run."""
        return self.local / "tmp" / run_id

    def prepare(self) -> None:
        """Makes the folders; `cache.prepare()` must have been called."""
        fs.make_folder(self.local)
        fs.fsync_folder(self.local.parent)
        fs.make_folder(self.encoded)
        self.cache.store.make_folder(self.commits)

    def new_draft(self, run_id: str, name: str) -> Path:
        """A free name in the folder of one run's drafts."""
        return self.make_tmp(run_id) / f"{name}-{secrets.token_hex(8)}.parquet"

    def make_tmp(self, name: str) -> Path:
        """Makes a folder of drafts, which only its owner may read."""
        fs.make_folder(self.local / "tmp", 0o700)
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


def _refuse_foreign_objects(root: Location, ours: set[str]) -> None:
    """Like `refuse_foreign`, by one look: others may work there at the same time."""
    if foreign := {path.name for path in root.iterdir()} - ours:
        raise UsageError(
            f"{root} holds '{min(foreign)}' and is not a cache. Choose another --output."
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
