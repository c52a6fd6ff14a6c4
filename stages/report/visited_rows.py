"""`rows.parquet`: the margin of each training row at each visit, and which rows are not learned.

Each rank appends a line for each step as it trains; the report joins them to one table. A margin is
the reward of a row's good completions less that of its bad ones, before the update of its step. Of
a row with one side only it is above 0 where the reward is on the side of its label.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from ...schemas.batches import Visits
from ...schemas.errors import CorruptionError
from ..storage.disk import fs
from ..storage.disk.lines import keep_lines, read_lines

SCHEMA = pl.Schema(
    {
        "row_id": pl.String(),
        "epoch": pl.Int64(),
        "step": pl.Int64(),
        "margin": pl.Float64(),
        "is_tie": pl.Boolean(),
    }
)


def visits_line(visits: Visits, *, epoch: int, step: int) -> bytes:
    """The line of a rank's rows of one step."""
    count = len(visits.row_ids)
    columns = (visits.row_ids, [epoch] * count, [step] * count, visits.margins, visits.are_ties)
    return json.dumps(dict(zip(SCHEMA, columns, strict=True))).encode()


def cut_visits(path: Path, keep_through: int) -> None:
    """Drops the lines of steps after that one; -1: all."""
    steps = _read_lines(path)["step"].list.first()
    lines = zip(read_lines(path), steps, strict=True)
    keep_lines(path, [line for line, step in lines if step <= keep_through])


def join_visits(paths: Sequence[Path], path: Path) -> None:
    """Writes the whole table, in the order of the steps."""
    parts = [_read_lines(one).explode(*SCHEMA) for one in paths]
    table = pl.concat([pl.DataFrame(schema=SCHEMA), *parts]).sort("step", "row_id")
    fs.drop_drafts(path)
    with fs.new_file(path, replaces=True) as sink:
        table.write_parquet(sink)


def read_visits(path: Path) -> pl.DataFrame:
    """The table of a run; empty if there is none."""
    try:
        return pl.read_parquet(path) if path.exists() else pl.DataFrame(schema=SCHEMA)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _damaged(path, error) from error


def learned_rows(visits: pl.DataFrame) -> pl.DataFrame:
    """A line for each row: its visits, and by its margins whether it is right in the end, right at
    no visit, or forgotten: above 0 at one visit and below 0 at a later one. Ties are neither.
    """
    counts = ~pl.col("is_tie") & pl.col("margin").is_finite()
    told = visits.sort("step").with_columns(
        (counts & (pl.col("margin") > 0)).alias("above"),
        (counts & (pl.col("margin") < 0)).alias("below"),
    )
    rows = told.group_by("row_id").agg(
        pl.len().alias("visits"),
        pl.col("above").last().alias("right"),
        (~pl.col("above").any()).alias("never"),
        (pl.col("above").cum_sum().gt(0) & pl.col("below")).any().alias("forgotten"),
    )
    return rows.sort("row_id")


def _read_lines(path: Path) -> pl.DataFrame:
    """The lines that are whole, with a list in each column."""
    lists = pl.Schema({name: pl.List(kind) for name, kind in SCHEMA.items()})
    try:
        # Not by polars: a margin may be NaN, which it does not read.
        lines = pl.DataFrame([json.loads(line.text) for line in read_lines(path)], schema=lists)
        if any(lines.null_count().row(0)):
            raise ValueError("a column is missing")
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error
    return lines


def _damaged(path: Path, why: Exception) -> CorruptionError:
    said = str(why).partition("\n")[0]
    return CorruptionError(f"{path} is damaged ({said}). Remove it: the report does without.")
