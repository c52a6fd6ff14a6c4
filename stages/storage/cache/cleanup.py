"""Removes work in progress and unnamed files once a manifest is written.

Files that only earlier manifests name stay until `align gc`, for trainings that began on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....schemas.cache import Manifest
from ....schemas.errors import counted
from ..bucket.objects import Location
from ..disk import fs
from ..disk.disk_store import TRASH
from ..disk.failpoints import reach
from ..store import store_of
from .cache_folder import PART_NAME, PLAN_NAME, CacheFolder, WorkFolder
from .manifest_file import earlier_manifests, load_manifest


def collect(folder: CacheFolder, works: Sequence[WorkFolder]) -> bool:
    """Removes work that is done, then the files that no manifest names; safe to repeat.

    `works` are those that a published manifest ends; the first of them is its own. Files stay while
    there is other work, which may need them. Returns whether this process removed the first work:
    of several that publish one manifest, one does.
    """
    load_manifest(folder)  # a cache that has none may lose nothing
    reach("gc.started")
    # The run that renamed the manifest may have died before it made the name durable.
    folder.store.sync_names(folder.root)
    # Commits go before the shards they name: a commit must never name a missing shard.
    was_here = [_retire(work) for work in works]
    _empty_trash(folder.local / folder.private.name)
    reach("gc.forgotten")
    found = _parts(folder)  # before other work is looked for: what begins now makes new ones
    if not folder.works():
        _remove_unnamed(folder, found)
    reach("gc.done")
    return was_here[:1] == [True]


def _remove_unnamed(folder: CacheFolder, found: set[Location]) -> None:
    named = _named_by(folder, [load_manifest(folder), *earlier_manifests(folder)])
    for path in sorted(found - named, key=str):
        folder.store.remove(path)
    if not any(path.parent == folder.quarantine for path in named):
        folder.store.remove_if_empty(folder.quarantine)
    for draft in _drafts(folder.local):
        fs.unlink(draft)


def _drafts(local: Path) -> list[Path]:
    """Drafts that killed processes left."""
    return [
        *local.glob(".manifest.json.*.tmp"),
        *(local / "_align" / "roots").glob(".*.tmp"),
        *(local / "_align").glob("mlflow-run.json"),  # of align 0.1, which kept no outbox
    ]


def is_tidy(folder: CacheFolder, manifest: Manifest) -> bool:
    """Whether `collect` has finished; reads names only."""
    named = _named_by(folder, [manifest, *earlier_manifests(folder)])
    names = {path.name for path in _listed(folder.private)}
    names |= {path.name for path in _listed(folder.local / folder.private.name)}
    ours = {folder.lock.name, folder.roots.name, folder.outbox.name}
    return names <= ours and _parts(folder) <= named


@dataclass(frozen=True)
class Superseded:
    """The files kept for trainings that began on the cache before it grew."""

    roots: tuple[str, ...]
    files: tuple[Location, ...]
    bytes: int

    def __bool__(self) -> bool:
        return bool(self.roots or self.files)

    def __str__(self) -> str:
        return (
            f"kept for trainings that began on {counted(len(self.roots), 'earlier roots')}: "
            f"{counted(len(self.files), 'files')} ({self.bytes:,} bytes); `align gc` removes them"
        )


def superseded(folder: CacheFolder, manifest: Manifest) -> Superseded:
    """The files that only earlier manifests name."""
    earlier = earlier_manifests(folder)
    files = sorted(_named_by(folder, earlier) - _named_by(folder, [manifest]), key=str)
    sizes = {path: size for path in files if (size := folder.store.size(path)) is not None}
    roots = tuple(one.root for one in earlier if one.root != manifest.root)
    return Superseded(roots, tuple(sizes), sum(sizes.values()))


def remove_superseded(folder: CacheFolder) -> None:
    """Removes all earlier manifests, then the files that only they named; the owner calls it."""
    for earlier in earlier_manifests(folder):
        folder.store.remove(folder.earlier(earlier.root))
    if folder.roots.is_dir():
        folder.store.sync_names(folder.roots)  # a manifest must never name a missing file
        folder.store.remove_if_empty(folder.roots)
    reach("superseded.forgotten")
    collect(folder, ())


def _named_by(folder: CacheFolder, manifests: Sequence[Manifest]) -> set[Location]:
    return {
        *(folder.data / shard.file for one in manifests for shard in one.shards),
        *(folder.root / entry.file for one in manifests for entry in one.quarantine),
    }


def _parts(folder: CacheFolder) -> set[Location]:
    found = (path for parent in (folder.data, folder.quarantine) for path in _listed(parent))
    return {path for path in found if PART_NAME.fullmatch(path.name)}


def _listed(parent: Location) -> Sequence[Location]:
    return store_of(parent).listed(parent) if parent.is_dir() else []


def _retire(work: WorkFolder) -> bool:
    """Takes work away, and what of it needs a disk; whether this process did."""
    was_here = work.cache.store.retire(work.root, first=PLAN_NAME)
    if work.local != work.root:
        store_of(work.local).retire(work.local, first=PLAN_NAME)
    return was_here


def _empty_trash(private: Path) -> None:
    if not private.is_dir():
        return
    # Also what a killed run renamed: after a power loss no half-emptied folder may have its name.
    fs.fsync_folder(private)
    for path in list(private.iterdir()):
        if path.name.startswith(TRASH):
            fs.remove_tree(path)
