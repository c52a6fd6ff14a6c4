"""Commits a unit: its shard is made durable first, then one commit names it.

A commit lists the rows that scoring could not use; when a cache is finished, those of all shards
and of the plan become one file.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ....schemas.cache import Commit, FileEntry
from ....schemas.errors import NonFiniteError, StorageError
from ....schemas.rows import Rejected, ScoredBlock
from ..disk import fs
from ..signed_records import SignedRecords
from .cache_folder import WorkFolder, part_name
from .shards import write_shard

logger = logging.getLogger("align")


@dataclass(frozen=True)
class UnitFacts:
    """Facts about a unit that its shard does not hold."""

    first_key: str  # hex of the ring key of the first row
    last_key: str
    tokens_per_batch: int
    rejected: tuple[Rejected, ...]  # rows dropped while scoring
    notes: dict[str, int]
    numerics: dict[str, str]


def commit_unit(
    work: WorkFolder, run_id: str, unit: int, block: ScoredBlock, facts: UnitFacts
) -> Commit:
    """Stores a scored unit; the commit it returns is another worker's if that one was first."""
    _require_finite(unit, block)
    draft = work.new_draft(run_id, f"{unit:08d}")
    try:
        write_shard(draft, block)
        ours = _describe(draft, unit, block, facts)
        final = work.cache.data / ours.file
        is_new = not final.exists()
        _install(draft, final)
    except BaseException:
        fs.discard(draft)
        raise
    kept = COMMITS.put(work.commit(unit), ours)
    if kept is ours and work.cache.url:
        share_commit(work, ours)
        kept = COMMITS.read(work.commit(unit))
    if kept != ours:
        _yield_to(kept, ours, final, is_new=is_new)
    return kept


def read_commits(work: WorkFolder, *, is_own: bool = True) -> dict[int, Commit]:
    """The finished units of a plan.

    One whose shard is missing or short does not count; of the own work its commit goes, so that
    the shard is made again.
    """
    folder, found = work.cache, {}
    stored = folder.remote.list("data") if folder.url else {}
    for path in COMMITS.names(work.commits):
        commit = COMMITS.read(path)
        shard = folder.shard(commit)
        there = stored.get(f"data/{commit.file}")
        size = there.size if there else -1
        if (size if folder.url else _size(shard)) == commit.bytes:
            found[commit.unit] = commit
        elif is_own:
            logger.warning(
                "%s is missing or short: its rows are scored again.", folder.shown(shard)
            )
            COMMITS.drop(path)
            if folder.url:
                folder.remote.delete([path.relative_to(folder.root).as_posix()])
    return found


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):  # another worker may remove its own
        return path.stat().st_size
    return -1


def share_commit(work: WorkFolder, commit: Commit) -> None:
    """Pushes a shard to the bucket, then its commit; there the first commit of a unit counts."""
    shard = work.cache.shard(commit)
    try:
        work.cache.push(shard)
    except StorageError:
        if shard.exists():
            raise  # else another process of this machine has pushed it
    work.cache.share(work.commit(commit.unit))
    fs.unlink(shard)


def _install(draft: Path, final: Path) -> None:
    """Gives a whole draft its name, once its bytes are durable."""
    fs.fsync(draft)
    fs.rename(draft, final)
    fs.fsync_folder(final.parent)


def _require_finite(unit: int, block: ScoredBlock) -> None:
    bad = np.flatnonzero(~np.isfinite(block.logps))
    if len(bad):
        raise NonFiniteError(
            f"unit {unit}: {len(bad)} of {len(block.logps)} log-probs are not finite, the first "
            f"of branch {bad[0]}. Check the weights; with float16, try --dtype bfloat16."
        )


def _describe(draft: Path, unit: int, block: ScoredBlock, facts: UnitFacts) -> Commit:
    sha256 = fs.sha256_of(draft)
    rejected = sorted(facts.rejected, key=lambda row: (row.file, row.row))
    return Commit(
        unit=unit,
        file=part_name(unit, sha256),
        bytes=draft.stat().st_size,
        sha256=sha256,
        rows=len(block.rows),
        branches=len(block.logps),
        tokens=len(block.rows.completions.values),
        first_key=facts.first_key,
        last_key=facts.last_key,
        tokens_per_batch=facts.tokens_per_batch,
        rejected=tuple(replace(row, detail=printable(row.detail)) for row in rejected),
        quarantined=dict(Counter(sorted(row.reason for row in rejected))),
        notes=facts.notes,
        numerics=facts.numerics,
    )


def _yield_to(theirs: Commit, ours: Commit, final: Path, *, is_new: bool) -> None:
    if theirs.file != ours.file:
        logger.warning(
            "unit %d: another worker's shard is kept; this worker's has other bytes.", ours.unit
        )
        if is_new:  # else another process put it
            fs.unlink(final)


COMMITS = SignedRecords(Commit, remedy="Remove this file and run the same command again.")


SCHEMA = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("file_name", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


def write_rejected(
    work: WorkFolder, run_id: str, rejected: Sequence[Rejected], input_names: Mapping[int, str]
) -> FileEntry | None:
    """Writes the rows that could not be used into one file of the cache; None without any."""
    if not rejected:
        return None
    columns = [
        pa.array([f"{row.file:016x}" for row in rejected], pa.string()),
        pa.array([printable(input_names[row.file]) for row in rejected], pa.string()),
        pa.array([row.row for row in rejected], pa.int64()),
        pa.array([row.reason for row in rejected], pa.string()),
        pa.array([printable(row.detail) for row in rejected], pa.string()),
    ]
    draft, path = work.new_draft(run_id, "rejected"), work.cache.rejected
    try:
        with fs.create(draft) as sink:
            pq.write_table(
                pa.Table.from_arrays(columns, schema=SCHEMA),
                sink,
                compression="zstd",
                compression_level=1,
                use_dictionary=["file", "file_name", "reason"],
                write_page_checksum=True,
            )
        sha256, size = fs.sha256_of(draft), draft.stat().st_size
        _install(draft, path)
    except BaseException:
        fs.discard(draft)
        raise
    if work.cache.url:
        work.cache.push(path)
    return FileEntry(path.name, size, sha256, len(rejected))


def printable(text: str) -> str:
    """Text that any file can hold: what is not Unicode is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()
