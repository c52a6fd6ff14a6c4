"""A cache may grow in place, but nothing that was paid for may be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..schemas.errors import FingerprintError
from ..schemas.rows import Role
from ..stages.score.reuse import look_up, packed_keys
from ..stages.storage.shards import iter_row_groups, read_shard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from ..schemas.manifest import Manifest
    from ..stages.prepare.spool import Spool
    from ..stages.storage.layout import CacheFolder

ROWS_AT_ONCE = 512


def require_growth(
    folder: CacheFolder, manifest: Manifest, spool: Spool, *, long_form: bool
) -> None:
    """Refuses when the cache holds what the new data no longer have.

    A prompt of long-form data that gained a completion is another row, with the old branches.
    """
    shards = [folder.data / commit.file for commit in manifest.shards]
    present = _ring_branches(spool) if long_form else _ring_rows(spool)
    stored = _stored_branches(shards) if long_form else _stored_rows(shards)
    present.sort()
    lost = total = 0
    for names in stored:
        lost += int((~look_up(present, names)[1]).sum())
        total += len(names)
    if lost:
        what = "completions" if long_form else "rows"
        raise FingerprintError(
            f"{folder.root} belongs to another cache: {lost} of its {total} {what} are not "
            "in the data any more (data.files differs). Choose another --output; scores both "
            "caches need are copied, not computed again."
        )


def _ring_rows(spool: Spool) -> NDArray[np.bytes_]:
    return _named(spool.column("row_id"), spool.column("copy"))


def _stored_rows(shards: list[Path]) -> Iterator[NDArray[np.bytes_]]:
    for path in shards:
        for table in iter_row_groups(path, ["row_id"]):
            names = table["row_id"].to_pylist()
            digests = b"".join(bytes.fromhex(name[:32]) for name in names)
            copies = np.array([int(name[33:] or 0) for name in names], dtype=np.int32)
            yield _named(np.frombuffer(digests, dtype="S16"), copies)


def _named(digests: NDArray[np.bytes_], copies: NDArray[np.int32]) -> NDArray[np.bytes_]:
    """Digest and copy of each row as one S20."""
    names = np.empty(len(digests), dtype=[("digest", "S16"), ("copy", ">i4")])
    names["digest"], names["copy"] = digests, copies
    return names.view("S20")


def _ring_branches(spool: Spool) -> NDArray[np.bytes_]:
    parts = [
        packed_keys(spool.read(start, min(start + ROWS_AT_ONCE, len(spool))).rows)
        for start in range(0, len(spool), ROWS_AT_ONCE)
    ]
    return np.concatenate([np.empty(0, dtype="S16"), *parts])


def _stored_branches(shards: list[Path]) -> Iterator[NDArray[np.bytes_]]:
    """The keys of all branches but the mismatched, which are chosen anew for new data."""
    for path in shards:
        rows = read_shard(path).rows
        yield packed_keys(rows)[rows.roles != Role.MISMATCHED]
