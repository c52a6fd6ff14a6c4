"""Removes work in progress and unnamed files once a manifest is written."""

from __future__ import annotations

import secrets
from pathlib import Path

from ....schemas.cache import Manifest
from ....schemas.errors import StorageError
from ..disk import fs
from .cache_folder import PART_NAME, CacheFolder, WorkFolder
from .cache_remote import remove_work, unneeded
from .manifest_file import load_manifest

TRASH = ".trash-"


def collect(folder: CacheFolder, own: WorkFolder) -> bool:
    """Removes all work, then the files that the manifest does not name; safe to repeat.

    Returns whether this process removed its own work: of several that publish one manifest, one
    does.
    """
    manifest = load_manifest(folder)  # a cache that has none may lose nothing
    # The run that wrote the manifest may have died before it made the name durable.
    fs.fsync_folder(folder.root)
    fs.drop_drafts(folder.manifest)
    was_here = remove_work(folder, manifest, own) if folder.url else True
    # Commits go before the shards they name: a commit must never name a missing shard.
    was_here = retire(own) and was_here
    for work in folder.works():
        retire(work)
    for path in sorted(folder.private.glob(f"{TRASH}*")):  # also what a killed run renamed
        fs.remove_tree(path)
    for path in sorted(_parts(folder) - _named_by(folder, manifest)):
        fs.unlink(path)
    return was_here


def is_tidy(folder: CacheFolder, manifest: Manifest) -> bool:
    """Whether `collect` has finished; reads names only."""
    if folder.url and unneeded(folder, manifest):
        return False
    names = {path.name for path in folder.private.glob("*")}
    ours = {folder.lock.name, folder.outbox.name}
    return names <= ours and _parts(folder) <= _named_by(folder, manifest)


def retire(work: WorkFolder) -> bool:
    """Takes work away; whether this process did. Half a folder must not look like work."""
    try:
        trash = f"{TRASH}{work.root.name}-{secrets.token_hex(4)}"
        fs.rename(work.root, work.root.with_name(trash))
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False  # or another process was first
        raise
    return True


def _named_by(folder: CacheFolder, manifest: Manifest) -> set[Path]:
    """The files that stay; those of a cache in a bucket are there and not here."""
    if folder.url:
        return set()
    shards = {folder.shard(shard) for shard in manifest.shards}
    return shards | ({folder.rejected} if manifest.rejected else set())


def _parts(folder: CacheFolder) -> set[Path]:
    shards = {path for path in folder.data.glob("*") if PART_NAME.fullmatch(path.name)}
    return shards | ({folder.rejected} if folder.rejected.is_file() else set())
