"""Removes work in progress and unnamed files once a manifest is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ....schemas.cache import Manifest
from ..bucket.objects import Location
from ..disk import fs
from ..disk.disk_store import TRASH
from ..store import store_of
from .cache_folder import PART_NAME, PLAN_NAME, CacheFolder, WorkFolder
from .manifest_file import load_manifest


def collect(folder: CacheFolder, own: WorkFolder) -> bool:
    """Removes all work, then the files that the manifest does not name; safe to repeat.

    Returns whether this process removed its own work: of several that publish one manifest, one
    does.
    """
    named = _named_by(folder, load_manifest(folder))  # a cache that has none may lose nothing
    # The run that wrote the manifest may have died before it made the name durable.
    folder.store.sync_names(folder.root)
    folder.store.drop_drafts(folder.root, (folder.manifest.name,))
    # Commits go before the shards they name: a commit must never name a missing shard.
    was_here = retire(own)
    for work in folder.works():
        retire(work)
    _empty_trash(folder.local / folder.private.name)
    for path in sorted(_parts(folder) - named, key=str):
        folder.store.remove(path)
    return was_here


def is_tidy(folder: CacheFolder, manifest: Manifest) -> bool:
    """Whether `collect` has finished; reads names only."""
    names = {path.name for path in _listed(folder.private)}
    names |= {path.name for path in _listed(folder.local / folder.private.name)}
    ours = {folder.lock.name, folder.outbox.name}
    return names <= ours and _parts(folder) <= _named_by(folder, manifest)


def _named_by(folder: CacheFolder, manifest: Manifest) -> set[Location]:
    shards = {folder.data / shard.file for shard in manifest.shards}
    return shards | ({folder.rejected} if manifest.rejected else set())


def _parts(folder: CacheFolder) -> set[Location]:
    shards = {path for path in _listed(folder.data) if PART_NAME.fullmatch(path.name)}
    return shards | ({folder.rejected} if folder.rejected.is_file() else set())


def _listed(parent: Location) -> Sequence[Location]:
    return store_of(parent).listed(parent) if parent.is_dir() else []


def retire(work: WorkFolder) -> bool:
    """Takes work away, and what of it needs a disk; whether this process did."""
    was_here = work.cache.store.retire(work.root, first=PLAN_NAME)
    if work.local != work.root:
        store_of(work.local).retire(work.local, first=PLAN_NAME)
    return was_here


def _empty_trash(private: Path) -> None:
    if not private.is_dir():
        return
    for path in list(private.iterdir()):  # also what a killed run renamed
        if path.name.startswith(TRASH):
            fs.remove_tree(path)
