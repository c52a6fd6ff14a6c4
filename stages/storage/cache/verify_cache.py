"""Checks the files of a cache against its manifest, and samples rows to score again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ....schemas.cache import Commit, FileEntry, Manifest
from ....schemas.errors import CorruptionError
from ....schemas.file_version import Remember, digest_anew
from ....schemas.rows import ScoredBlock
from ..bucket.objects import Location
from .cache_folder import PART_NAME, CacheFolder
from .commits import counted
from .manifest_file import load_manifest
from .shards import read_rows, read_shard


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
    """The damage of each damaged shard, by unit."""
    damage = {}
    for shard in manifest.shards:
        try:
            check_shard(folder, shard)
        except CorruptionError as error:
            damage[shard.unit] = str(error)
    return damage


def _wrongly_described(folder: CacheFolder, commit: Commit) -> str:
    """How a shard's rows differ from what its manifest says, though its digest is right."""
    try:
        found = counted(read_shard(folder.shard(commit)))
    except CorruptionError as error:
        return f"unit {commit.unit}: {error}"
    lines = [
        f"{name} {getattr(commit, name)} instead of {value}"
        for name, value in found.items()
        if getattr(commit, name) != value
    ]
    return f"unit {commit.unit}: its manifest says {', '.join(lines)}." if lines else ""


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
        _check(folder.shard(commit), commit.file, commit, folder.store.measure, remember)


def check_before_reading(
    folder: CacheFolder, commit: Commit, remember: Remember = digest_anew
) -> None:
    """Like `check_shard`, of the bytes that are read: of an object its copy, or a new one.

    It names no unit: who reads a cache names that of any damage.
    """
    _check(folder.shard(commit), commit.file, commit, folder.store.measure_read, remember)


def _damaged_quarantine(folder: CacheFolder, manifest: Manifest) -> list[str]:
    damage = []
    for entry in manifest.quarantine:
        name = Path(entry.file).name
        try:
            _check(folder.rejected(entry), name, entry, folder.store.measure, digest_anew)
        except CorruptionError as error:
            damage.append(f"quarantine: {error}")
    return damage


def _check(
    path: Location,
    name: str,
    expected: Commit | FileEntry,
    measure: Callable[[Location, int, Remember], tuple[int, str]],
    remember: Remember,
) -> None:
    if not PART_NAME.fullmatch(name):
        raise CorruptionError(f"{name!r} is not the name of a shard.")
    size, sha256 = measure(path, expected.bytes, remember)
    if size != expected.bytes:
        raise CorruptionError(f"{path} has {size} bytes, not {expected.bytes}.")
    if sha256 != expected.sha256:
        raise CorruptionError(f"{path} is not what was written (sha256 differs).")


def sample_rows(
    folder: CacheFolder, manifest: Manifest, count: int, vocabulary: int
) -> Iterator[tuple[str, ScoredBlock]]:
    """Yields rows that are spread over the cache, a few at a time, and the name of their shard.

    They are to be scored by a model that knows so many token ids.
    """
    wanted = np.unique(np.arange(count) * manifest.rows // count)
    first = 0
    for commit in manifest.shards:
        here = wanted[(wanted >= first) & (wanted < first + commit.rows)] - first
        first += commit.rows
        if len(here):
            with naming_unit(commit.unit):
                for block in read_rows(folder.shard(commit), here, vocabulary):
                    yield commit.file, block
