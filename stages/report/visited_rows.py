"""`rows.parquet`: the margin of each training row at each visit, and which rows are not learned.

Each rank appends a line for each step as it trains; the report joins them to one table. A margin is
the reward of a row's good completions less that of its bad ones, before the update of its step. Of
a row with one side only it is above 0 where the reward is on the side of its label.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.batches import Visits
from ...schemas.errors import CorruptionError
from ..storage.disk import fs
from ..storage.disk.lines import Line, keep_lines, read_lines

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


def visits_line(visits: Visits, *, epoch: int, step: int) -> bytes:
    """The line of a rank's rows of one step."""
    count = len(visits.row_ids)
    columns = (visits.row_ids, [epoch] * count, [step] * count, visits.margins, visits.are_ties)
    return json.dumps(dict(zip(SCHEMA.names, columns, strict=True))).encode()


def cut_visits(path: Path, keep_through: int) -> None:
    """Drops the lines of steps after that one; -1: all."""
    keep_lines(path, [line for line, part in _parts(path) if part["step"][0] <= keep_through])


def join_visits(paths: Sequence[Path], path: Path) -> None:
    """Writes the whole table, in the order of the steps."""
    parts = [pa.table(part, SCHEMA) for one in paths for _, part in _parts(one)]
    table = pa.concat_tables([SCHEMA.empty_table(), *parts])
    whole = table.sort_by([("step", "ascending"), ("row_id", "ascending")])
    fs.drop_drafts(path)
    with fs.new_file(path, replaces=True) as sink:
        pq.write_table(whole, sink, compression="zstd")


def _parts(path: Path) -> Iterator[tuple[Line, dict[str, list[Any]]]]:
    for line in read_lines(path):
        try:
            part = json.loads(line.text)
            if [*part] != SCHEMA.names or not part["step"]:
                raise ValueError("it has other columns")
        except ValueError as error:
            raise _damaged(path, str(error)) from error
        yield line, part


def _damaged(path: Path, said: str) -> CorruptionError:
    return CorruptionError(f"{path} is damaged ({said}). Remove it: the report does without.")


def read_visits(path: Path) -> pl.DataFrame:
    """The table of a run."""
    import polars as pl  # noqa: PLC0415 - 20 MiB that a rank without a report does not need

    try:
        with fs.open_file(path) as source:
            table = pq.ParquetFile(source, page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error).partition("\n")[0]) from error
    return pl.DataFrame(table)


@dataclass(frozen=True)
class Learned:
    """What became of the training rows, by their ids."""

    rows: int
    visits: int  # most of one row
    right: int  # rows whose margin was above 0 at their last visit
    never: tuple[str, ...]  # whose margin was above 0 at no visit
    forgotten: tuple[str, ...]  # above 0 at one visit and below 0 at a later one; ties are neither


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
