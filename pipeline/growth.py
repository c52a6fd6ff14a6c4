"""A cache may grow in place, but nothing that was paid for or is still read may be lost."""

from __future__ import annotations

import uuid
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from ..schemas.errors import FingerprintError, UsageError
from ..schemas.rows import Role
from ..stages.score.reuse import look_up
from ..stages.storage.cache_folder import CacheFolder
from ..stages.storage.cleanup import remove_superseded, superseded
from ..stages.storage.locks import owner_lock
from ..stages.storage.manifest_file import load_manifest
from ..stages.storage.shard_columns import parse_row_ids
from ..stages.storage.shards import iter_row_groups, read_shard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from ..schemas.cache import Commit, Manifest
    from ..schemas.rows import RowBlock
    from ..stages.pairing.spool import Spool
    from ..stages.storage.cleanup import Superseded

ROWS_AT_ONCE = 4096


def require_growth(
    folder: CacheFolder, manifest: Manifest, spool: Spool, *, long_form: bool
) -> None:
    """Refuses when the cache holds what the new data no longer have.

    A prompt of long-form data that gained a completion is another row, with the old branches; what
    its completions share may have become less, so a branch is known by its prompt and all its ids.
    """
    stored, present = (_branches, _ring_branches) if long_form else (_rows, _ring_rows)
    lost = total = 0
    for shard in manifest.shards:
        names = stored(folder.data / shard.file)
        is_lost = np.ones(len(names), dtype=np.bool_)
        for start, stop in _arc(spool, shard, None if long_form else names):
            is_lost &= ~look_up(np.sort(present(spool, start, stop)), names)[1]
        lost, total = lost + int(is_lost.sum()), total + len(names)
    if lost:
        what = "completions" if long_form else "rows"
        raise FingerprintError(
            f"{folder.root} belongs to another cache: {lost} of its {total} {what} are not "
            "in the data any more (data.files differs). Choose another --output; scores both "
            "caches need are copied, not computed again."
        )


def gone_without(cache: Path) -> Superseded:
    """What `remove_earlier` would remove."""
    folder = CacheFolder(cache)
    return superseded(folder, load_manifest(folder))


def remove_earlier(cache: Path) -> None:
    """Leaves of a cache that has grown only what it holds now."""
    folder = CacheFolder(cache)
    manifest = load_manifest(folder)
    with owner_lock(folder, uuid.uuid4().hex[:12]):
        if works := folder.works():
            raise UsageError(
                f"{works[0].root} is an unfinished run, whose shards may be in use. Give its "
                "command again, or delete that folder, then run align gc again."
            )
        remove_superseded(folder, manifest)


def _arc(spool: Spool, shard: Commit, rows: NDArray[np.bytes_] | None) -> Iterator[tuple[int, int]]:
    """Where on the ring all rows of a shard lie, a stretch at a time."""
    first, last = spool.between(int(shard.first_key, 16), int(shard.last_key, 16))
    if shard.first_key == shard.last_key and rows is not None and len(rows):
        # One prompt that may fill many shards; its rows lie in the order of their ids.
        digests = np.sort(rows.astype("S16"))
        first, last = spool.between_ids(first, last, digests[0], digests[-1])
    for start in range(first, last, ROWS_AT_ONCE):
        yield start, min(start + ROWS_AT_ONCE, last)


def _ring_rows(spool: Spool, start: int, stop: int) -> NDArray[np.bytes_]:
    return _named(spool.column("row_id", start, stop), spool.column("copy", start, stop))


def _rows(path: Path) -> NDArray[np.bytes_]:
    """The rows of a shard."""
    parts = [np.empty(0, dtype="S20")]
    for table in iter_row_groups(path, ["row_id"]):
        parts += [_named(*parse_row_ids(ids, str(path))) for ids in table["row_id"].chunks]
    return np.concatenate(parts)


def _named(digests: NDArray[np.bytes_], copies: NDArray[np.int32]) -> NDArray[np.bytes_]:
    """Digest and copy of each row as one S20."""
    names = np.empty(len(digests), dtype=[("digest", "S16"), ("copy", ">i4")])
    names["digest"], names["copy"] = digests, copies
    return names.view("S20")


def _ring_branches(spool: Spool, start: int, stop: int) -> NDArray[np.bytes_]:
    return _named_branches(spool.read(start, stop).rows)


def _branches(path: Path) -> NDArray[np.bytes_]:
    """The branches of a shard but the mismatched, which are chosen anew for new data."""
    rows = read_shard(path).rows
    names: NDArray[np.bytes_] = _named_branches(rows)[rows.roles != Role.MISMATCHED]
    return names


def _named_branches(rows: RowBlock) -> NDArray[np.bytes_]:
    """A digest of each branch that does not depend on where its prompt ends, as S16."""
    prompts = [key + ids.tobytes() for key, ids in zip(_keys(rows), rows.prompts, strict=True)]
    branches = zip(rows.row_of_branch.tolist(), rows.completions, strict=True)
    names = [blake2b(prompts[row] + ids.tobytes(), digest_size=16) for row, ids in branches]
    return np.frombuffer(b"".join(name.digest() for name in names), dtype="S16")


def _keys(rows: RowBlock) -> list[bytes]:
    keys = np.ascontiguousarray(rows.prompt_keys.prompt).tobytes()
    return [keys[start : start + 16] for start in range(0, len(keys), 16)]
