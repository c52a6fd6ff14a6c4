"""Rows from Python, written as a file of JSON lines that every process can read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from ...schemas.errors import UsageError
from .cells import shown
from .readers import batch_rows

_AT_ONCE = 1000


@contextmanager
def files_of(data: Any) -> Iterator[list[str]]:
    """The named files, or a temporary file of the given rows.

    Equal rows make equal bytes in any kind of table, so that their cache is found again.
    """
    if isinstance(data, str | Path):
        yield [str(data)]
    elif isinstance(data, Sequence) and all(isinstance(one, str | Path) for one in data):
        yield [*map(str, data)]
    else:
        with TemporaryDirectory(prefix="align-rows-") as folder:
            path = Path(folder) / "rows.jsonl"
            with path.open("w", encoding="utf-8") as file:
                for number, row in enumerate(_rows(data)):
                    if not isinstance(row, Mapping):
                        raise UsageError(
                            f"Row {number:,} of the data has no columns: {shown(row)}."
                        )
                    file.write(f"{json.dumps(dict(row), default=_plain)}\n")
            yield [str(path)]


def _rows(data: Any) -> Iterator[Any]:
    """The rows of a list, a data set of `datasets`, or a frame of polars, pandas or Arrow."""
    if isinstance(data, Mapping):
        raise UsageError(
            f"The data are a mapping of {', '.join(map(repr, data))}. Give a list of rows, or one "
            "split of a data set."
        )
    if hasattr(data, "with_format"):  # of `datasets`
        tables = data.with_format("arrow").iter(batch_size=_AT_ONCE)
    elif type(data).__module__.partition(".")[0] == "pandas":
        tables = [pa.Table.from_pandas(data, preserve_index=False)]
    elif hasattr(data, "__arrow_c_stream__"):
        tables = [pa.table(data)]
    elif isinstance(data, Iterable):
        yield from data
        return
    else:
        raise UsageError(
            f"The data are of the type {type(data).__name__}. Give files, a list of rows, a frame "
            "or a data set."
        )
    for table in tables:
        for batch in table.to_batches(max_chunksize=_AT_ONCE):
            yield from batch_rows(batch)


def _plain(value: Any) -> Any:
    """A value that JSON lacks."""
    if isinstance(value, date | time):
        return value.isoformat()
    if hasattr(value, "tolist"):  # of NumPy
        return value.tolist()
    raise UsageError(
        f"The data hold a value of the type {type(value).__name__}, which JSON cannot write: "
        f"{shown(value)}. Leave its column out."
    )
