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
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.given_rows import files_of
from align.stages.data.input_files import iter_chunks, open_inputs
from support.read_rows import bot, user

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
        inputs = open_inputs(files)
        shape = common_shape(inputs, {})
        found = [parse_chunk(chunk, shape) for chunk in iter_chunks(inputs, shape.columns)]
        data = Path(files[0]).read_bytes()
    assert not Path(files[0]).exists()
    assert not any(rejected for _, rejected in found)
    return data, [one for records, _ in found for one in records]


@pytest.fixture(scope="module")
def as_list():
    return written(ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_bytes_in_whatever_they_are_given(kind, as_list):
    data, records = written(KINDS[kind](ROWS))
    assert data == as_list[0]
    assert [one.prompt for one in records] == [tuple(row["prompt"]) for row in ROWS]
    assert [one.carried["weight"] for one in records] == [row["weight"] for row in ROWS]


def test_what_json_lacks_is_written_as_what_it_is_or_refused():
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    more = {"weight": np.float32(0.5), "day": datetime.date(2020, 1, 2)}
    assert written([pair | more])[1][0].carried == {"weight": 0.5}
    for data, message in (
        ([pair | {"picture": b"png"}], "type bytes.* Take its column out"),
        (pl.DataFrame([pair | {"picture": b"png"}]), "type bytes"),
        ({"train": [pair]}, "mapping of 'train'"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list([pair])}), "mapping of 'train'"),
        ([pair, "more"], "Row 1 of the data has no columns"),
        (7, "of the type int"),
        ([], "No data files given"),
        (iter(()), "is empty"),
    ):
        with pytest.raises(UsageError, match=message):
            written(data)


def test_paths_stay_as_they_are(tmp_path):
    for given, files in (("a", ["a"]), (tmp_path, [str(tmp_path)]), (["a", Path("b")], ["a", "b"])):
        with files_of(given) as found:
            assert found == files
