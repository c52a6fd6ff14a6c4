"""`rows.parquet`: the margin of each training row at each visit, and which rows are not learned.

Ranks write parts of it as they train, one for each checkpoint; at the end they become one table.
A margin is the reward of a row's good completions less that of its bad ones, before the update of
its step. Of a row with one side only it is above 0 where the reward is on the side of its label.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.batches import Visits
from ...schemas.errors import CorruptionError
from ..storage.disk import fs

if TYPE_CHECKING:
    import polars as pl

SCHEMA = pa.schema(
    {
        "row_id": pa.string(),
        "epoch": pa.int64(),
        "step": pa.int64(),
        "margin": pa.float64(),
        "is_tie": pa.bool_(),
    }
)


class PendingVisits:
    """Visits that are not written down yet."""

    def __init__(self) -> None:
        self._steps: list[pa.Table] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, visits: Visits, *, epoch: int, step: int) -> None:
        """Adds the rows of one step."""
        count = len(visits.row_ids)
        columns = {
            "row_id": visits.row_ids,
            "epoch": [epoch] * count,
            "step": [step] * count,
            "margin": visits.margins,
            "is_tie": visits.are_ties,
        }
        self._steps.append(pa.table(columns, SCHEMA))

    def write(self, path: Path) -> None:
        """Writes them as one file."""
        sink = io.BytesIO()
        pq.write_table(pa.concat_tables(self._steps), sink, compression="zstd")
        fs.publish(path, sink.getvalue())


def join_parts(parts: Sequence[Path], path: Path) -> None:
    """Writes the whole table, in the order of the steps."""
    table = pa.concat_tables([_read(part) for part in parts])
    whole = table.sort_by([("step", "ascending"), ("row_id", "ascending")])
    fs.drop_drafts(path)
    with fs.new_file(path, replaces=True) as sink:
        pq.write_table(whole, sink, compression="zstd")


def _read(path: Path) -> pa.Table:
    try:
        with fs.open_file(path) as source:
            table = pq.ParquetFile(source, page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error).partition("\n")[0]) from error
    if table.schema.remove_metadata() != SCHEMA or any(one.null_count for one in table.columns):
        raise _damaged(path, "it has other columns, or values are missing")
    return table


def _damaged(path: Path, said: str) -> CorruptionError:
    return CorruptionError(f"{path} is damaged ({said}). Remove it: the report does without.")


@dataclass(frozen=True)
class Learned:
    """What became of the training rows, by their ids."""

    rows: int
    visits: int  # most of one row
    right: int  # rows whose margin was above 0 at their last visit
    never: tuple[str, ...]  # whose margin was above 0 at no visit
    forgotten: tuple[str, ...]  # above 0 at one visit and below 0 at a later one; ties are neither


def read_visits(path: Path) -> pl.DataFrame:
    """The table of a run."""
    import polars as pl  # noqa: PLC0415 - 20 MiB that a rank without a report does not need

    return pl.DataFrame(_read(path))


def learned_rows(visits: pl.DataFrame) -> Learned:
    """Which rows are right in the end, which never were, and which were for a while."""
    import polars as pl  # noqa: PLC0415 - as above

    is_told = ~pl.col("is_tie") & pl.col("margin").is_finite()
    told = visits.sort("step").with_columns(
        (is_told & (pl.col("margin") > 0)).alias("above"),
        (is_told & (pl.col("margin") < 0)).alias("below"),
    )
    rows = told.group_by("row_id").agg(
        pl.len().alias("visits"),
        pl.col("above").last().alias("right"),
        (~pl.col("above").any()).alias("never"),
        (pl.col("above").cum_sum().gt(0) & pl.col("below")).any().alias("forgotten"),
    )
    named = rows.sort("row_id")
    return Learned(
        rows=len(rows),
        visits=int(rows["visits"].max() or 0),  # type: ignore[arg-type]
        right=int(rows["right"].sum()),
        never=tuple(named.filter("never")["row_id"]),
        forgotten=tuple(named.filter("forgotten")["row_id"]),
    )
