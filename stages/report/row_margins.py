"""`rows.parquet`: the margin of each training row in each step that trains on it.

Each rank appends a line per step, and the report joins the lines to one table. A margin is the
reward of a row's good completions minus that of its bad ones, before the update of the step. A row
with one label only has a margin above 0 if its reward has the sign of the label.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from ...schemas.batches import RowMargins
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


def margins_line(rows: RowMargins, *, epoch: int, step: int) -> bytes:
    """The line of a rank's rows in one step."""
    count = len(rows.row_ids)
    columns = (rows.row_ids, [epoch] * count, [step] * count, rows.margins, rows.are_ties)
    return json.dumps(dict(zip(SCHEMA, columns, strict=True))).encode()


def cut_margins(path: Path, keep_through: int) -> None:
    """Drops the lines of later steps; -1: all lines."""
    steps = _read_lines(path)["step"].list.first()
    lines = zip(read_lines(path), steps, strict=True)
    keep_lines(path, [line for line, step in lines if step <= keep_through])


def join_margins(paths: Sequence[Path], path: Path) -> None:
    """Writes the lines of all ranks as one table, sorted by step."""
    parts = [_read_lines(one).explode(*SCHEMA) for one in paths]
    table = pl.concat([pl.DataFrame(schema=SCHEMA), *parts]).sort("step", "row_id")
    fs.drop_drafts(path)
    with fs.new_file(path, replaces=True) as sink:
        table.write_parquet(sink)


def read_margins(path: Path) -> pl.DataFrame:
    """The table of a run; empty if there is no file."""
    try:
        return pl.read_parquet(path) if path.exists() else pl.DataFrame(schema=SCHEMA)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _damaged(path, error) from error


def learned_rows(margins: pl.DataFrame) -> pl.DataFrame:
    """Per row, how often it was trained on, and whether it was learned.

    `correct`: its last margin is above 0. `never`: no margin is above 0. `forgotten`: a margin is
    above 0 and a later one below 0. Ties are neither above nor below.
    """
    counts = ~pl.col("is_tie") & pl.col("margin").is_finite()
    signed = margins.sort("step").with_columns(
        (counts & (pl.col("margin") > 0)).alias("above"),
        (counts & (pl.col("margin") < 0)).alias("below"),
    )
    rows = signed.group_by("row_id").agg(
        pl.len().alias("times"),
        pl.col("above").last().alias("correct"),
        (~pl.col("above").any()).alias("never"),
        (pl.col("above").cum_sum().gt(0) & pl.col("below")).any().alias("forgotten"),
    )
    return rows.sort("row_id")


def _read_lines(path: Path) -> pl.DataFrame:
    """The complete lines, with a list in each column."""
    lists = pl.Schema({name: pl.List(kind) for name, kind in SCHEMA.items()})
    try:
        # `pl.read_ndjson` refuses NaN, which a margin may be.
        lines = pl.DataFrame([json.loads(line.text) for line in read_lines(path)], schema=lists)
        if any(lines.null_count().row(0)):
            raise ValueError("a column is missing")
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error
    return lines


def _damaged(path: Path, why: Exception) -> CorruptionError:
    reason = str(why).partition("\n")[0]
    return CorruptionError(
        f"{path} is damaged ({reason}). Remove it: the report is written without it."
    )
