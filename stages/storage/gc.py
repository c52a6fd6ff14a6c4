"""What is removed once a manifest stands: work in progress, and files it does not name."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from . import fs
from .failpoints import reach
from .layout import PART_NAME, WORK_NAME
from .manifest import load_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from ...schemas.manifest import Manifest
    from .layout import CacheFolder

_TRASH = ".trash-"


def collect(folder: CacheFolder, manifest: Manifest) -> None:
    """Leaves of a cache only what its published manifest names; may be repeated at any time."""
    assert load_manifest(folder).root == manifest.root, "only after the manifest is published"
    reach("gc.started")
    # The run that renamed the manifest may have died before it made the name durable.
    fs.fsync_folder(folder.root)
    # Commits go before the shards they name: no commit may ever point at nothing.
    _forget_work(folder.private)
    reach("gc.forgotten")
    _remove_unnamed(folder.data, {shard.file for shard in manifest.shards})
    quarantine = {entry.file.rpartition("/")[2] for entry in manifest.quarantine}
    _remove_unnamed(folder.quarantine, quarantine)
    if not quarantine:
        fs.remove_folder(folder.quarantine)
    _remove_drafts(folder.manifest)
    _remove_drafts(folder.mlflow)
    reach("gc.done")


def is_tidy(folder: CacheFolder, manifest: Manifest) -> bool:
    """Whether `collect` was carried through; reads names only."""
    named = {shard.file for shard in manifest.shards}
    kept = {entry.file.rpartition("/")[2] for entry in manifest.quarantine}
    return (
        _names(folder.private) <= {folder.lock.name, folder.mlflow.name}
        and _parts(folder.data) <= named
        and _parts(folder.quarantine) <= kept
    )


def _names(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()} if parent.is_dir() else set()


def _parts(parent: Path) -> set[str]:
    return {name for name in _names(parent) if PART_NAME.fullmatch(name)}


def _forget_work(private: Path) -> None:
    if not private.is_dir():
        return
    for path in list(private.iterdir()):
        if WORK_NAME.fullmatch(path.name):
            # Renamed first: a half-removed folder must not look like work to be resumed.
            fs.rename(path, path.with_name(f"{_TRASH}{path.name}-{secrets.token_hex(4)}"))
    # Also for what a killed run renamed: nothing is emptied whose old name may come back.
    fs.fsync_folder(private)
    for path in list(private.iterdir()):
        if path.name.startswith(_TRASH):
            fs.remove_tree(path)


def _remove_unnamed(parent: Path, named: set[str]) -> None:
    if not parent.is_dir():
        return
    for path in sorted(parent.iterdir()):
        if PART_NAME.fullmatch(path.name) and path.name not in named:
            fs.unlink(path)


def _remove_drafts(path: Path) -> None:
    for draft in path.parent.glob(f".{path.name}.*.tmp"):
        fs.unlink(draft)
