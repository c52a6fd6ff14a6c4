"""Rows given in Python become the same bytes in whatever they are given, or are refused."""

import datetime
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from align.schemas.errors import UsageError
from align.stages.data.given_rows import files_of
from support.read_rows import bot, read_file, user

ROWS = [
    {
        "prompt": [user(f"Grüße {n}?")],
        "chosen": [bot("Yes.")],
        "rejected": [bot("No.")],
        "weight": n / 4,
    }
    for n in range(1100)
]
KINDS = {
    "generator": lambda rows: (dict(row) for row in rows),
    "datasets": datasets.Dataset.from_list,
    "selected": lambda rows: (
        datasets.Dataset.from_list(rows[::-1])
        .select(range(len(rows) - 1, -1, -1))
        .with_format("numpy")
    ),
    "streamed": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    "polars": pl.DataFrame,
    "pandas": lambda rows: pd.DataFrame(rows, index=[f"i{n}" for n in range(len(rows))]),
    "arrow": pa.Table.from_pylist,
}


def written(data):
    """The bytes of the rows, and their records."""
    with files_of(data) as files:
        records, rejected = read_file(files[0])
        data = Path(files[0]).read_bytes()
    assert not Path(files[0]).exists()
    assert not rejected
    return data, records


@pytest.fixture(scope="module")
def as_list():
    return written(ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_bytes_in_whatever_they_are_given(kind, as_list):
    data, records = written(KINDS[kind](ROWS))
    assert data == as_list[0]
    assert [one.prompt for one in records] == [tuple(row["prompt"]) for row in ROWS]
    assert [one.carried["weight"] for one in records] == [row["weight"] for row in ROWS]


ROW = {"prompt": "a", "chosen": "b", "rejected": "c"}


def test_what_json_lacks_is_written_as_what_it_is():
    more = {"weight": np.float32(0.5), "day": datetime.date(2020, 1, 2)}
    assert written([ROW | more])[1][0].carried == {"weight": 0.5}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ([ROW | {"picture": b"png"}], "bytes"),
        (pl.DataFrame([ROW | {"picture": b"png"}]), "bytes"),
        ({"train": [ROW]}, "'train'"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list([ROW])}), "'train'"),
        ([ROW, "more"], "Row 1 "),
        (7, "int"),
        (iter(()), r"rows\.jsonl"),
    ],
)
def test_what_is_no_data_is_refused_by_what_it_is(data, named):
    with pytest.raises(UsageError, match=named):
        written(data)


def test_paths_stay_as_they_are(tmp_path):
    for given, files in (("a", ["a"]), (tmp_path, [str(tmp_path)]), (["a", Path("b")], ["a", "b"])):
        with files_of(given) as found:
            assert found == files
