"""Single rows of a cache: one that was scored, and those that could not be used."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...schemas.cache import Manifest
from ...schemas.errors import UsageError
from ...schemas.row_table import Rows
from ..storage.cache import Cache
from ..storage.shards import iter_row_groups, open_shard, read_rows

LEAST_DIGITS = 6  # of an id that is cut short
_ID = re.compile(rf"[0-9a-f]{{{LEAST_DIGITS},32}}(-[0-9]+)?")
_PLACE = re.compile(r"(?:(?P<file>.+):)?(?P<row>[0-9]{1,18})")


@dataclass(frozen=True)
class Place:
    """A row of the data, as a person names it: FILE:ROW, ROW of an only file, or an id's start."""

    file: str = ""  # the name of an input, or nothing
    row: int = -1
    row_id: str = ""

    @staticmethod
    def of(text: str, manifest: Manifest) -> Place:
        """The place that a text names."""
        names = {entry.name for entry in manifest.inputs}
        found = _PLACE.fullmatch(text)
        file = (found["file"] or (min(names) if len(names) == 1 else "")) if found else ""
        if found and file in names:
            return Place(file, int(found["row"]))
        if _ID.fullmatch(text):
            return Place(row_id=text)
        raise UsageError(
            f"--row {text}: expected FILE:ROW (rows are counted from 0; the files are "
            f"{', '.join(sorted(names))}), or the first {LEAST_DIGITS} digits of an id or more."
        )


def find_row(folder: Cache, manifest: Manifest, place: Place) -> Rows | None:
    """The row with all of its branches, or None if no shard holds it."""
    identities = {f"{one.identity:016x}" for one in manifest.inputs if one.name == place.file}
    for shard in manifest.shards:
        path, first = folder.shard(shard), 0
        for group in iter_row_groups(path, ["row_id", "source"]):
            here = np.flatnonzero(_is_there(group, place, identities))
            if len(here):
                (block,) = read_rows(path, first + here[:1])
                return block
            first += len(group)
    return None


def prompts_of(
    folder: Cache, manifest: Manifest, ids: Collection[str]
) -> dict[str, NDArray[np.int32]]:
    """The prompts of some rows as token ids, by the ids of the rows; those that there are."""
    found: dict[str, NDArray[np.int32]] = {}
    for shard in manifest.shards:
        if len(found) == len({*ids}):
            break
        path = folder.shard(shard)
        groups = [group["row_id"] for group in iter_row_groups(path, ["row_id"])]
        names = pa.chunked_array([chunk for one in groups for chunk in one.chunks], pa.string())
        here = np.flatnonzero(pc.is_in(names, value_set=pa.array(sorted(ids), pa.string())))
        for block in read_rows(path, here) if len(here) else ():
            trees = zip(block.ids(), block.trees(), strict=True)
            found |= {row_id: tree.prompt for row_id, tree in trees}
    return found


def _is_there(group: pa.Table, place: Place, identities: set[str]) -> NDArray[np.bool_]:
    if place.row_id:
        is_there = pc.starts_with(group["row_id"], place.row_id)
    else:
        source = group["source"].combine_chunks()
        is_file = pc.is_in(source.field("file"), value_set=pa.array(sorted(identities)))
        is_there = pc.and_(is_file, pc.equal(source.field("row"), place.row))
    return np.asarray(is_there)


@dataclass(frozen=True)
class Dropped:
    """A row of the data that could not be used."""

    file: str  # its name
    row: int
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file} row {self.row}: {self.reason}: {self.detail}"


def dropped_rows(folder: Cache, manifest: Manifest) -> Iterator[Dropped]:
    """The rows that could not be used, in the order of the data."""
    if manifest.rejected is None:
        return
    with open_shard(folder.rejected) as file:
        rows = file.read(use_threads=False).to_pylist()
    for row in rows:
        yield Dropped(row["file_name"], row["row"], row["reason"], row["detail"])
