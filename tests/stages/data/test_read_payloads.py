"""Cells of CSV and Arrow mean the same as the values of JSON."""

import json
from datetime import date
from decimal import Decimal

import pyarrow as pa

from align.schemas.rows import Role
from align.stages.data.data_schema import detect_shape
from align.stages.data.decode_rows import parse_chunk, read_cells
from align.stages.data.file_formats import ArrowRows, CsvRows, JsonRows
from align.stages.data.input_files import Chunk


def shape_of(columns):
    return detect_shape(list(columns), {}, where="test")


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def parse_arrow(table):
    batch = table.combine_chunks().to_batches()[0]
    return parse_chunk(Chunk(0, 0, ArrowRows(batch)), shape_of(table.column_names))


def test_csv_cells_are_text_until_a_column_says_otherwise():
    header = ("prompt", "completions", "scores")
    shape = shape_of(header)
    rows = [
        ["p", '["a", "b"]', "[1, 2.5]"],
        ["p", '["a", "b"]', "1, 2"],
        ["p", "['a']", "[1]"],
        ["p", "a"],
        ["\udcff", '["a"]', "[1]"],
        ['[{"role": "user", "content": "hi"}]', '["a"]', "[1]"],
        ["[{'role': 'user', 'content': 'hi'}]", '["a"]', "[1]"],
        ["[1] is a footnote", '["a"]', "[1]"],
    ]
    records, rejected = parse_chunk(Chunk(0, 0, CsvRows(header, rows)), shape)
    assert [record.row for record in records] == [0, 5, 7]
    assert records[0].scores == (1.0, 2.5)
    assert records[1].completions == ((bot("a"),),)
    assert [bad.reason for bad in rejected] == ["schema"] * 3 + ["bad_utf8", "schema"]
    assert "2 cells under a header of 3" in rejected[2].detail


def test_conversations_in_json_text_are_the_same_in_every_format():
    prompt, answer = [user("p")], [bot('say "c"\nplease')]
    texts = {
        "prompt": json.dumps(prompt),
        "completions": json.dumps([json.dumps(answer), "plain", answer]),
        "scores": "[1, 0, 0.5]",
    }
    values = texts | {"completions": json.loads(texts["completions"]), "scores": [1, 0, 0.5]}
    shape = shape_of(texts)
    payloads = [
        CsvRows(tuple(texts), [list(texts.values())]),
        JsonRows([json.dumps(texts).encode()]),
        JsonRows([json.dumps(values).encode()]),
        ArrowRows(pa.RecordBatch.from_pylist([texts])),
    ]
    for payload in payloads:
        (record,), rejected = parse_chunk(Chunk(0, 0, payload), shape)
        assert not rejected
        assert record.prompt == (user("p"),)
        assert record.completions == (tuple(answer), (bot("plain"),), tuple(answer))
        assert record.scores == (1.0, 0.0, 0.5)


def test_csv_labels_and_numbers_are_spelled_out():
    header = ("prompt", "completion", "label", "margin")
    rows = [["p", "c", "1.0", "2"], ["p", "c", "False", "-1e3"], ["p", "c", "", "1"]]
    records, rejected = parse_chunk(Chunk(0, 0, CsvRows(header, rows)), shape_of(header))
    assert [record.roles[0] for record in records] == [Role.DESIRABLE, Role.UNDESIRABLE]
    assert [record.carried["margin"] for record in records] == [2.0, -1000.0]
    assert rejected[0].reason == "null"


def test_structs_of_columnar_files_lose_the_keys_their_row_lacks():
    call = {"id": "1", "arguments": {"a": 1}}
    other = {"id": "2", "arguments": {"b": 2}}
    rows = [
        {"prompt": [user("p") | {"name": "x"}], "chosen": [bot("c")], "rejected": [bot("r")]},
        {
            "prompt": [user("p")],
            "chosen": [{"role": "assistant", "tool_calls": [call, other]}],
            "rejected": [bot("r")],
            "tools": [{"name": "f", "strict": True}, {"name": "g"}],
        },
    ]
    records, _ = parse_arrow(pa.Table.from_pylist(rows, pa.Table.from_pylist(rows[::-1]).schema))
    (_, second), tools = records, records[1].tools
    assert second.prompt == (user("p"),)
    assert second.completions[0][0]["tool_calls"] == [call, other]
    assert tools == ({"name": "f", "strict": True}, {"name": "g"})


def called(arguments):
    """A table of one row, whose answer calls a tool with arguments of an Arrow type."""
    values = pa.StructArray.from_arrays([pa.array(["f"]), arguments], ["name", "arguments"])
    calls = pa.ListArray.from_arrays([0, 1], values)
    said = pa.StructArray.from_arrays(
        [pa.array(["assistant"]), pa.array(["c"]), calls], ["role", "content", "tool_calls"]
    )
    asked = pa.array([[user("p")]])
    chosen, bad = pa.ListArray.from_arrays([0, 1], said), pa.array([[bot("r")]])
    return pa.table({"prompt": asked, "chosen": chosen, "rejected": bad})


def test_arguments_may_be_a_map_of_arrow_and_hold_nothing_that_json_lacks():
    maps = pa.map_(pa.string(), pa.string())
    (record,), _ = parse_arrow(called(pa.array([[("city", "Oslo"), ("unit", "C")]], maps)))
    assert record.completions[0][0]["tool_calls"][0]["arguments"] == {"city": "Oslo", "unit": "C"}
    for arguments, what in (
        (pa.array([[("city", "Oslo"), ("city", "Rome")]], maps), "'chosen' has an object"),
        (pa.array([{"day": date(2024, 1, 1)}]), "'chosen' holds a date"),
        (pa.array([{"price": Decimal("1.5")}]), "'chosen' holds a Decimal"),
    ):
        ((bad,), records) = reversed(parse_arrow(called(arguments)))
        assert (bad.reason, records) == ("schema", [])
        assert what in bad.detail


def test_a_slice_of_lists_gives_its_own_rows():
    lists = [["a"], [], ["b", "c"], ["d", "e", "f"]]
    table = pa.table(
        {"prompt": list("pqrs"), "completions": lists, "scores": [[1.0] * len(x) for x in lists]}
    )
    batch = table.to_batches()[0].slice(2, 1)
    records, _ = parse_chunk(Chunk(0, 2, ArrowRows(batch)), shape_of(table.column_names))
    assert [(r.row, r.prompt, r.completions) for r in records] == [(2, "r", ("b", "c"))]


def test_bytes_that_are_no_text_reject_their_own_row_only():
    offsets, content = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")
    prompts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, content])
    table = pa.table({"prompt": prompts, "chosen": ["c"] * 3, "rejected": ["r"] * 3})
    records, rejected = parse_arrow(table)
    assert [record.prompt for record in records] == ["a", "b"]
    assert [(bad.row, bad.reason) for bad in rejected] == [(1, "bad_utf8")]


def test_arrow_values_of_other_types_are_read_or_rejected():
    table = pa.table(
        {
            "prompt": pa.array(["p"] * 3).dictionary_encode(),
            "completion": pa.array(["c"] * 3, pa.large_string()),
            "score": pa.array([Decimal("1.5"), None, Decimal("2.5")]),
        }
    )
    records, rejected = parse_arrow(table)
    assert [record.scores[0] for record in records] == [1.5, 2.5]
    assert rejected[0].reason == "null"
    days = pa.table({"prompt": [date(2024, 1, 1)], "chosen": [b"c"], "rejected": ["r"]})
    assert parse_arrow(days)[1][0].reason == "schema"


def test_times_that_python_has_not_reject_their_own_row_only():
    when = pa.array([0, 2**62], pa.timestamp("us"))
    table = pa.table({"prompt": ["p", "q"], "chosen": ["c"] * 2, "rejected": ["r"] * 2})
    cells = read_cells(ArrowRows(table.append_column("when", when).to_batches()[0]), ("when",))
    first, second = cells
    assert (first["prompt"], second.reason) == ("p", "schema")
    assert "'when'" in second.detail
