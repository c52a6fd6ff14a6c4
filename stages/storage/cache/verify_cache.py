"""Checks the files of a cache against its manifest, and samples rows to score again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ....schemas.cache import Commit, FileEntry, Manifest
from ....schemas.errors import CorruptionError
from ....schemas.file_version import Remember, digest_anew
from ....schemas.rows import ScoredBlock
from ..bucket.objects import Location
from .cache_folder import CacheFolder
from .manifest_file import load_manifest
from .shards import read_rows


def verify_cache(folder: CacheFolder) -> Manifest:
    """Reads every file that the manifest names; a CorruptionError lists all damaged units."""
    manifest = load_manifest(folder)
    damage = [*damaged_units(folder, manifest).values(), *_damaged_list(folder, manifest)]
    if damage:
        shown = "\n".join(f"  {what}" for what in damage[:10])
        raise CorruptionError(
            f"{folder.root}: {len(damage)} of {len(manifest.shards) + bool(manifest.rejected)} "
            f"files are damaged, first {min(10, len(damage))}:\n{shown}\n"
            "Restore them from a copy, or make the cache again."
        )
    return manifest


def damaged_units(folder: CacheFolder, manifest: Manifest) -> dict[int, str]:
    """The damage of each damaged shard, by unit."""
    damage = {}
    for shard in manifest.shards:
        try:
            check_shard(folder, shard)
        except CorruptionError as error:
            damage[shard.unit] = str(error)
    return damage


@contextmanager
def naming_unit(unit: int) -> Iterator[None]:
    """Adds the unit's number to the message of a damaged file."""
    try:
        yield
    except CorruptionError as error:
        raise CorruptionError(f"unit {unit}: {error}") from error


def check_shard(folder: CacheFolder, commit: Commit, remember: Remember = digest_anew) -> None:
    """CorruptionError when the shard is not, byte for byte, what was committed."""
    with naming_unit(commit.unit):
        _check(folder.shard(commit), commit, folder.store.measure, remember)


def check_before_reading(
    folder: CacheFolder, commit: Commit, remember: Remember = digest_anew
) -> None:
    """Like `check_shard`, of the bytes that are read: of an object its copy, or a new one.

    It names no unit: who reads a cache names that of any damage.
    """
    _check(folder.shard(commit), commit, folder.store.measure_read, remember)


def _damaged_list(folder: CacheFolder, manifest: Manifest) -> list[str]:
    """The damage of the list of rejected rows."""
    if manifest.rejected:
        try:
            path = folder.pinned(manifest.rejected)
            _check(path, manifest.rejected, folder.store.measure, digest_anew)
        except CorruptionError as error:
            return [f"rejected rows: {error}"]
    return []


def _check(
    path: Location,
    expected: Commit | FileEntry,
    measure: Callable[[Location, int, Remember], tuple[int, str]],
    remember: Remember,
) -> None:
    size, sha256 = measure(path, expected.bytes, remember)
    if size != expected.bytes:
        raise CorruptionError(f"{path} has {size} bytes, not {expected.bytes}.")
    if sha256 != expected.sha256:
        raise CorruptionError(f"{path} is not what was written (sha256 differs).")


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
            with naming_unit(commit.unit):
                for block in read_rows(folder.shard(commit), here):
                    yield commit.file, block
