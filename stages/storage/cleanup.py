"""Removes work in progress and unnamed files once a manifest is written.

Files that only earlier manifests name stay until `align gc`, for trainings that began on them.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...schemas.cache import Manifest
from ...schemas.errors import counted
from . import fs, objects, places
from .cache_folder import PART_NAME, WORK_NAME, CacheFolder
from .failpoints import reach
from .manifest_file import earlier_manifests, load_manifest
from .objects import Location, ObjectPath

_TRASH = ".trash-"


def collect(folder: CacheFolder, manifest: Manifest) -> None:
    """Removes the files that neither the manifest nor an earlier one names; safe to repeat."""
    assert load_manifest(folder).root == manifest.root, "only after the manifest is published"
    reach("gc.started")
    # The run that renamed the manifest may have died before it made the name durable.
    places.fsync_folder(folder.root)
    # Commits go before the shards they name: a commit must never name a missing shard.
    if isinstance(folder.root, ObjectPath):
        _forget_objects(folder)
    _forget_work(folder.local / folder.private.name)
    reach("gc.forgotten")
    named = _named_by(folder, [manifest, *earlier_manifests(folder)])
    for path in sorted(_parts(folder) - named, key=str):
        places.unlink(path)
    if not any(path.parent == folder.quarantine for path in named):
        places.remove_folder(folder.quarantine)
    for draft in _drafts(folder):
        fs.unlink(draft)
    reach("gc.done")


def _drafts(folder: CacheFolder) -> list[Path]:
    """What a killed process left of files; a store has no drafts."""
    if isinstance(folder.root, ObjectPath):
        return []
    return [
        *folder.root.glob(f".{folder.manifest.name}.*.tmp"),
        *(folder.root / "_align" / "roots").glob(".*.tmp"),
        *(folder.root / "_align").glob("mlflow-run.json"),  # of align 0.1, which kept no outbox
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
    sizes = {path: size for path in files if (size := places.size_of(path)) is not None}
    roots = tuple(one.root for one in earlier if one.root != manifest.root)
    return Superseded(roots, tuple(sizes), sum(sizes.values()))


def remove_superseded(folder: CacheFolder, manifest: Manifest) -> None:
    """Removes all earlier manifests, then the files that only they named; the owner calls it."""
    for earlier in earlier_manifests(folder):
        places.unlink(folder.earlier(earlier.root))
    if folder.roots.is_dir():
        places.fsync_folder(folder.roots)  # a manifest must never name a missing file
        places.remove_folder(folder.roots)
    reach("superseded.forgotten")
    collect(folder, manifest)


def _named_by(folder: CacheFolder, manifests: Sequence[Manifest]) -> set[Location]:
    return {
        *(folder.data / shard.file for one in manifests for shard in one.shards),
        *(folder.root / entry.file for one in manifests for entry in one.quarantine),
    }


def _parts(folder: CacheFolder) -> set[Location]:
    found = (path for parent in (folder.data, folder.quarantine) for path in _listed(parent))
    return {path for path in found if PART_NAME.fullmatch(path.name)}


def _listed(parent: Location) -> Sequence[Location]:
    return places.listed(parent) if parent.is_dir() else []


def _forget_objects(folder: CacheFolder) -> None:
    """Removes the work in a store: of each the plan first, so that nobody takes up the rest."""
    for work in folder.works():
        places.unlink(work.plan)
        if isinstance(work.root, ObjectPath):
            objects.remove_below(work.root)


def _forget_work(private: Path) -> None:
    if not private.is_dir():
        return
    for path in list(private.iterdir()):
        if WORK_NAME.fullmatch(path.name):
            # Renamed first: a half-removed folder must not look like work to be resumed.
            fs.rename(path, path.with_name(f"{_TRASH}{path.name}-{secrets.token_hex(4)}"))
    # Also what a killed run renamed: after a power loss no half-emptied folder may have its name.
    fs.fsync_folder(private)
    for path in list(private.iterdir()):
        if path.name.startswith(_TRASH):
            fs.remove_tree(path)
