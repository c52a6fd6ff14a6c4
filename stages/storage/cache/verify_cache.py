"""Checks the files of a cache against its manifest, and samples rows to score again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ....schemas.cache import Commit, FileEntry, Manifest
from ....schemas.errors import CorruptionError, StorageError
from ....schemas.file_version import Remember, digest_anew
from ....schemas.rows import ScoredBlock
from ..disk.digests import remembered_sha256
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
        check_before_reading(folder, commit, remember)


def check_before_reading(
    folder: CacheFolder, commit: Commit, remember: Remember = digest_anew
) -> None:
    """Like `check_shard`, but names no unit: the reader of a cache names that of any damage."""
    _check(folder.shard(commit), commit, remember)


def _damaged_list(folder: CacheFolder, manifest: Manifest) -> list[str]:
    """The damage of the list of rejected rows."""
    if manifest.rejected:
        try:
            _check(folder.rejected, manifest.rejected, digest_anew)
        except CorruptionError as error:
            return [f"rejected rows: {error}"]
    return []


def _check(path: Path, expected: Commit | FileEntry, remember: Remember) -> None:
    try:
        if (size := path.stat().st_size) != expected.bytes:
            raise CorruptionError(f"{path} has {size} bytes, not {expected.bytes}.")
        if remembered_sha256(path, remember) != expected.sha256:
            raise CorruptionError(f"{path} is not what was written (sha256 differs).")
    except (OSError, StorageError) as error:
        raise CorruptionError(f"{path} cannot be opened: {error.__cause__ or error}.") from error


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
