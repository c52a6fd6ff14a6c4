"""Checks the files of a cache against its manifest, and samples rows to score again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path

import numpy as np

from ...schemas.cache import Commit, FileEntry, Manifest
from ...schemas.errors import CorruptionError, StorageError
from ...schemas.file_version import Remember, digest_anew
from ...schemas.rows import ScoredBlock
from . import fs, local_copies
from .cache_folder import PART_NAME, CacheFolder
from .commits import counted
from .digest_memory import shard_sha256
from .manifest_file import load_manifest
from .objects import Location, ObjectPath
from .shards import read_rows, read_shard

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def verify_cache(folder: CacheFolder) -> Manifest:
    """Reads every file that the manifest names; a CorruptionError lists all damaged units."""
    manifest = load_manifest(folder)
    units = damaged_units(folder, manifest)
    whole = [shard for shard in manifest.shards if shard.unit not in units]
    wrong = [said for shard in whole if (said := _wrongly_described(folder, shard))]
    damage = [*units.values(), *wrong, *_damaged_quarantine(folder, manifest)]
    if damage:
        shown = "\n".join(f"  {what}" for what in damage[:10])
        raise CorruptionError(
            f"{folder.root}: {len(damage)} of {len(manifest.shards) + len(manifest.quarantine)} "
            f"files are damaged, first {min(10, len(damage))}:\n{shown}\n"
            "Restore them from a copy, or make the cache again."
        )
    return manifest


def damaged_units(folder: CacheFolder, manifest: Manifest) -> dict[int, str]:
    """What is wrong with each damaged shard, by unit."""
    damage = {}
    for shard in manifest.shards:
        try:
            check_shard(folder, shard)
        except CorruptionError as error:
            damage[shard.unit] = str(error)
    return damage


def _wrongly_described(folder: CacheFolder, commit: Commit) -> str:
    """How a shard's rows differ from what its manifest says, though its digest is right."""
    found = counted(read_shard(folder.shard(commit)))
    lines = [
        f"{name} {getattr(commit, name)} instead of {value}"
        for name, value in found.items()
        if getattr(commit, name) != value
    ]
    return f"unit {commit.unit}: its manifest says {', '.join(lines)}." if lines else ""


def check_shard(folder: CacheFolder, commit: Commit, remember: Remember = digest_anew) -> None:
    """CorruptionError when the shard is not, byte for byte, what was committed."""
    _check(folder.shard(commit), commit.file, commit, what=f"unit {commit.unit}", remember=remember)


def check_before_reading(
    folder: CacheFolder, commit: Commit, remember: Remember = digest_anew
) -> None:
    """Like `check_shard`, but of an object its copy here, which is fetched unless it is whole."""
    path = folder.shard(commit)
    if isinstance(path, ObjectPath):
        local_copies.check_copy(path, remember)
    else:
        check_shard(folder, commit, remember)


def _damaged_quarantine(folder: CacheFolder, manifest: Manifest) -> list[str]:
    damage = []
    for entry in manifest.quarantine:
        try:
            _check(folder.rejected(entry), Path(entry.file).name, entry, what="quarantine")
        except CorruptionError as error:
            damage.append(str(error))
    return damage


def _check(
    path: Location,
    name: str,
    expected: Commit | FileEntry,
    *,
    what: str,
    remember: Remember = digest_anew,
) -> None:
    if not PART_NAME.fullmatch(name):
        raise CorruptionError(f"{what}: {name!r} is not the name of a shard.")
    if isinstance(path, ObjectPath):
        size, sha256 = local_copies.sha256_of(path)
        _require_same(path, expected, what=what, size=size, sha256=sha256)
        return
    with _opened(path.parent, what) as folder:
        # Opened again for a digest: one that is remembered is of the version that is there then.
        opened = partial(_file, name, folder, path, what)
        with opened() as source:
            found = os.fstat(source.fileno()).st_size
        sha256 = shard_sha256(path, opened, remember) if found == expected.bytes else ""
        _require_same(path, expected, what=what, size=found, sha256=sha256)


def _require_same(
    path: Location, expected: Commit | FileEntry, *, what: str, size: int, sha256: str
) -> None:
    if size != expected.bytes:
        raise CorruptionError(f"{what}: {path} has {size} bytes, not {expected.bytes}.")
    if sha256 != expected.sha256:
        raise CorruptionError(f"{what}: {path} is not what was written (sha256 differs).")


def _file(name: str, folder: int, path: Path, what: str) -> BufferedReader:
    try:
        return fs.open_regular(Path(name), folder=folder)
    except StorageError as error:
        raise CorruptionError(f"{what}: {path} cannot be opened: {error.__cause__}.") from error


@contextmanager
def _opened(parent: Path, what: str) -> Iterator[int]:
    try:
        descriptor = os.open(parent, _FOLDER)
    except OSError as error:
        raise CorruptionError(f"{what}: {parent} cannot be opened: {error}.") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sample_rows(
    folder: CacheFolder, manifest: Manifest, count: int
) -> Iterator[tuple[str, ScoredBlock]]:
    """Yields rows that are spread over the cache, a few at a time, and the name of their shard."""
    wanted = np.unique(np.arange(count) * manifest.rows // count)
    first = 0
    for commit in manifest.shards:
        here = wanted[(wanted >= first) & (wanted < first + commit.rows)] - first
        first += commit.rows
        if len(here):
            for block in read_rows(folder.shard(commit), here):
                yield commit.file, block
