"""Finds single rows of a cache: stored ones and rejected ones."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...schemas.cache import Manifest
from ...schemas.errors import UsageError
from ...schemas.row_table import Rows
from ..storage.cache import Cache
from ..storage.shards import iter_row_groups, open_shard, read_rows

LEAST_DIGITS = 6  # of an abbreviated id
_ID = re.compile(rf"[0-9a-f]{{{LEAST_DIGITS},32}}(-[0-9]+)?")
_PLACE = re.compile(r"(?:(?P<file>.+):)?(?P<row>[0-9]{1,18})")


def find_row(cache: Cache, manifest: Manifest, query: str) -> Rows | str:
    """The row FILE:ROW, ROW of the only file, or with this start of its id.

    A rejected row is returned as its reason.
    """
    names = sorted({entry.name for entry in manifest.inputs})
    named = _PLACE.fullmatch(query)
    file = (named["file"] or (names[0] if len(names) == 1 else "")) if named else ""
    row = int(named["row"]) if named and file in names else None
    if row is None and not _ID.fullmatch(query):
        raise UsageError(
            f"--row {query}: write FILE:ROW (rows count from 0; the files are "
            f"{', '.join(names)}), or at least the first {LEAST_DIGITS} digits of an id."
        )
    identities = pa.array(f"{one.identity:016x}" for one in manifest.inputs if one.name == file)
    for shard in manifest.shards:
        path, first = cache.shard(shard), 0
        for group in iter_row_groups(path, ["row_id", "source"]):
            if row is None:
                is_there = pc.starts_with(group["row_id"], query)
            else:
                source = group["source"].combine_chunks()
                is_file = pc.is_in(source.field("file"), value_set=identities)
                is_there = pc.and_(is_file, pc.equal(source.field("row"), row))
            here = np.flatnonzero(np.asarray(is_there))
            if len(here):
                (block,) = read_rows(path, first + here[:1])
                return block
            first += len(group)
    for rejected in rejected_rows(cache, manifest):
        if row is not None and rejected.startswith(f"{file} row {row}: "):
            return rejected
    raise UsageError(
        f"{cache} has no row {query}, neither stored nor rejected. `align inspect {cache}` lists "
        "its files."
    )


def rejected_rows(cache: Cache, manifest: Manifest) -> list[str]:
    """The rejected rows and their reasons, in the order of the data."""
    if manifest.rejected is None:
        return []
    with open_shard(cache.rejected) as file:
        rows = file.read(use_threads=False).to_pylist()
    return [
        f"{one['file_name']} row {one['row']}: {one['reason']}: {one['detail']}" for one in rows
    ]


def prompts_of(
    cache: Cache, manifest: Manifest, ids: Collection[str]
) -> dict[str, NDArray[np.int32]]:
    """The prompts of these rows as token ids, by row id; unknown ids are left out."""
    found: dict[str, NDArray[np.int32]] = {}
    for shard in manifest.shards:
        if len(found) == len({*ids}):
            break
        path = cache.shard(shard)
        groups = [group["row_id"] for group in iter_row_groups(path, ["row_id"])]
        names = pa.chunked_array([chunk for one in groups for chunk in one.chunks], pa.string())
        here = np.flatnonzero(pc.is_in(names, value_set=pa.array(sorted(ids), pa.string())))
        for block in read_rows(path, here) if len(here) else ():
            trees = zip(block.ids(), block.trees(), strict=True)
            found |= {row_id: tree.prompt for row_id, tree in trees}
    return found
