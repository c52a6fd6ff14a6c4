"""Cells of CSV and Arrow mean the same as the values of JSON, and every row is counted once."""

import json
from datetime import date
from decimal import Decimal

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.rows import REASONS, Role
from align.stages.data.decode_rows import parse_chunk, read_cells
from align.stages.data.file_formats import ArrowRows, CsvRows, JsonRows
from align.stages.data.input_files import Chunk
from support.read_rows import bot, shape_of, user


def parse_csv(header, *rows):
    return parse_chunk(Chunk(0, 0, CsvRows(header, list(rows))), shape_of(header))


def parse_arrow(table):
    batch = table.combine_chunks().to_batches()[0]
    return parse_chunk(Chunk(0, 0, ArrowRows(batch)), shape_of(table.column_names))


def test_csv_cells_are_text_until_a_column_says_otherwise():
    chat = '[{"role": "user", "content": "hi"}]'
    cells = [
        ("p", '["a", "b"]', "[1, 2.5]"),
        ("p", '["a", "b"]', "1, 2"),
        ("p", "['a']", "[1]"),
        ("p", "a"),
        ("\udcff", '["a"]', "[1]"),
        (chat, '["a"]', "[1]"),
        (chat.replace('"', "'"), '["a"]', "[1]"),
    ]
    records, rejected = parse_csv(("prompt", "completions", "scores"), *cells)
    assert [(one.row, one.scores) for one in records] == [(0, (1.0, 2.5)), (5, (1.0,))]
    assert records[1].completions == ((bot("a"),),)
    assert [bad.reason for bad in rejected] == ["schema"] * 3 + ["bad_utf8", "schema"]
    assert "2 cells under a header of 3" in rejected[2].detail
    cells = [("p", "c", "1.0", "2"), ("p", "c", "False", "-1e3"), ("p", "c", "", "1")]
    records, (bad,) = parse_csv(("prompt", "completion", "label", "margin"), *cells)
    assert [record.roles[0] for record in records] == [Role.DESIRABLE, Role.UNDESIRABLE]
    assert [record.carried["margin"] for record in records] == [2.0, -1000.0]
    assert bad.reason == "null"


def test_conversations_in_json_text_are_the_same_in_every_format():
    prompt, answer = [user("p")], [bot('say "c"\nplease')]
    texts = {
        "prompt": json.dumps(prompt),
        "completions": json.dumps([json.dumps(answer), "[ ] no list", answer]),
        "scores": "[1, 0, 0.5]",
    }
    values = texts | {"completions": json.loads(texts["completions"]), "scores": [1, 0, 0.5]}
    payloads = [
        CsvRows(tuple(texts), [list(texts.values())]),
        JsonRows([json.dumps(texts).encode()]),
        JsonRows([json.dumps(values).encode()]),
        ArrowRows(pa.RecordBatch.from_pylist([texts])),
    ]
    for payload in payloads:
        (record,), rejected = parse_chunk(Chunk(0, 0, payload), shape_of(texts))
        assert not rejected
        assert record.prompt == (user("p"),)
        assert record.completions == (tuple(answer), (bot("[ ] no list"),), tuple(answer))
        assert record.scores == (1.0, 0.0, 0.5)


def test_structs_of_columnar_files_lose_the_keys_their_row_lacks():
    call, other = {"id": "1", "arguments": {"a": 1}}, {"id": "2", "arguments": {"b": 2}}
    called = {"role": "assistant", "tool_calls": [call, other]}
    tools = [{"name": "f", "strict": True}, {"name": "g"}]
    rows = [
        {"prompt": [user("p") | {"name": "x"}], "chosen": [bot("c")], "rejected": [bot("r")]},
        {"prompt": [user("p")], "chosen": [called], "rejected": [bot("r")], "tools": tools},
    ]
    records, _ = parse_arrow(pa.Table.from_pylist(rows, pa.Table.from_pylist(rows[::-1]).schema))
    assert records[1].prompt == (user("p"),)
    assert records[1].completions[0] == (called,)
    assert records[1].tools == tuple(tools)


def called(arguments, kind):
    """A table of one row, whose answer calls a tool with arguments of an Arrow type."""
    calls = pa.list_(pa.struct([("name", pa.string()), ("arguments", kind)]))
    turns = pa.list_(pa.struct([("role", pa.string()), ("tool_calls", calls)]))
    said = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]
    return pa.table(
        {"prompt": [[user("p")]], "chosen": pa.array([said], turns), "rejected": [[bot("r")]]}
    )


def test_arguments_may_be_a_map_of_arrow_and_hold_nothing_that_json_lacks():
    maps = pa.map_(pa.string(), pa.string())
    (record,), _ = parse_arrow(called([("city", "Oslo"), ("unit", "C")], maps))
    assert record.completions[0][0]["tool_calls"][0]["arguments"] == {"city": "Oslo", "unit": "C"}
    for arguments, kind, what in (
        ([("city", "Oslo"), ("city", "Rome")], maps, "'chosen' has an object"),
        ({"day": date(2024, 1, 1)}, pa.struct([("day", pa.date32())]), "'chosen' holds a date"),
        (
            {"a": Decimal("1.5")},
            pa.struct([("a", pa.decimal128(2, 1))]),
            "'chosen' holds a Decimal",
        ),
    ):
        records, (bad,) = parse_arrow(called(arguments, kind))
        assert (bad.reason, records) == ("schema", [])
        assert what in bad.detail


def test_arrow_values_of_other_types_are_read_or_reject_their_own_row_only():
    scores = [Decimal("1.5"), None, Decimal("2.5")]
    table = pa.table({"prompt": ["p"] * 3, "completion": ["c"] * 3, "score": scores})
    records, rejected = parse_arrow(table)
    assert [record.scores[0] for record in records] == [1.5, 2.5]
    assert rejected[0].reason == "null"
    days = pa.table({"prompt": [date(2024, 1, 1)], "chosen": [b"c"], "rejected": ["r"]})
    assert parse_arrow(days)[1][0].reason == "schema"
    when = pa.array([0, 2**62], pa.timestamp("us"))  # the second is none that Python has
    table = pa.table({"prompt": ["p", "q"], "when": when})
    first, second = read_cells(ArrowRows(table.to_batches()[0]), ("when",))
    assert (first["prompt"], second.reason) == ("p", "schema")
    assert "'when'" in second.detail
    lists = pa.table({"prompt": ["p", "q"], "completions": [["a"], ["b", "c"]]}).to_batches()[0]
    records, _ = parse_chunk(Chunk(0, 1, ArrowRows(lists.slice(1))), shape_of(lists.schema.names))
    assert [(one.row, one.prompt, one.completions) for one in records] == [(1, "q", ("b", "c"))]


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


@settings(max_examples=200)
@given(st.sampled_from(COLUMNS), st.booleans(), st.data())
def test_whatever_a_row_holds_it_is_one_record_or_rejected_with_a_reason(columns, is_json, data):
    if is_json:
        rows = data.draw(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(columns, JUNK))))
        texts = [json.dumps(row).encode() for row in rows]
        payload = JsonRows(texts + data.draw(st.lists(st.binary(max_size=20), max_size=3)))
    else:
        rows = data.draw(st.lists(st.lists(st.text() | st.just("[{"), max_size=5)))
        payload = CsvRows(columns, rows)
    records, rejected = parse_chunk(Chunk(1, 7, payload), shape_of(columns))
    good, bad = [record.row for record in records], [bad.row for bad in rejected]
    assert sorted(good + bad) == list(range(7, 7 + len(payload)))
    assert (good, bad) == (sorted(good), sorted(bad))
    assert all(bad.reason in REASONS and bad.detail.isprintable() for bad in rejected)
