"""Whatever a row holds, it is counted once."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.rows import REASONS
from align.stages.data.data_schema import detect_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.file_formats import CsvRows, JsonRows
from align.stages.data.input_files import Chunk
from support.damaged_files import ARROW, PARQUET, faults_of, read_in_slices
from support.flips import SEED


def shape_of(columns):
    return detect_shape(list(columns), {}, where="test")


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=5)
    | st.sampled_from(["p", "a b", "a c", "true", "[{", '[{"role": "user", "content": "x"}]']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "x"]), inner)
    ),
    max_leaves=6,
)
COLUMNS = (
    ("prompt", "chosen", "rejected", "margin"),
    ("chosen", "rejected", "system", "tools"),
    ("prompt", "completion", "label", "chat_template_kwargs"),
    ("prompt", "completions", "scores", "weight"),
    ("prompt", "completion", "score", "system"),
)


def require_every_row_once(chunk, shape):
    records, rejected = parse_chunk(chunk, shape)
    rows = [record.row for record in records], [bad.row for bad in rejected]
    assert sorted(rows[0] + rows[1]) == list(range(chunk.row, chunk.row + len(chunk)))
    assert list(rows[0]) == sorted(rows[0])
    assert list(rows[1]) == sorted(rows[1])
    assert all(bad.reason in REASONS and bad.detail.isprintable() for bad in rejected)


@settings(max_examples=300)
@given(st.sampled_from(COLUMNS), st.data())
def test_rows_in_are_records_plus_rejected(columns, data):
    rows = data.draw(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(columns, JUNK))))
    texts = [json.dumps(row).encode() for row in rows]
    texts += data.draw(st.lists(st.binary(max_size=20), max_size=3))
    require_every_row_once(Chunk(1, 7, JsonRows(texts)), shape_of(columns))


@settings(max_examples=100)
@given(st.sampled_from(COLUMNS), st.lists(st.lists(st.text() | st.just("[{"), max_size=5)))
def test_csv_rows_in_are_records_plus_rejected(columns, rows):
    require_every_row_once(Chunk(1, 7, CsvRows(columns, rows)), shape_of(columns))


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", ARROW)
def test_a_damaged_arrow_file_is_refused_or_read_row_by_row_from_its_own_bytes(
    tmp_path, layout, count
):
    (tmp_path / "whole.arrow").write_bytes(ARROW[layout])
    assert len(read_in_slices(tmp_path / "whole.arrow")[0]) == 30
    path, is_plain = tmp_path / "a.arrow", "zstd" not in layout
    assert not faults_of(path, ARROW[layout], count, SEED, is_plain)


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", PARQUET)
def test_a_damaged_parquet_file_is_refused_or_read_row_by_row(tmp_path, layout, count):
    (tmp_path / "whole.parquet").write_bytes(PARQUET[layout])
    assert len(read_in_slices(tmp_path / "whole.parquet")[0]) == 30
    assert not faults_of(tmp_path / "a.parquet", PARQUET[layout], count, SEED)
