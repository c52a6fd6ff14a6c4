"""Cells of CSV and Arrow mean the same as the values of JSON, and every row is counted once."""

import csv
import json
from datetime import date
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from align.schemas.rows import REASONS, Role
from align.stages.data.files import InputFile, open_inputs, rows_of
from align.stages.data.text_rows import text_rows_in
from support.read_rows import bot, parted, read_file, shape_of, user


def parse_csv(folder, header, *rows):
    with (folder / "a.csv").open("w", newline="", errors="surrogateescape") as file:
        csv.writer(file).writerows([header, *rows])
    return read_file(folder / "a.csv")


def parse_arrow(folder, table):
    with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    return read_file(folder / "a.arrow")


def test_csv_cells_are_text_until_a_column_says_otherwise(tmp_path):
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
    records, rejected = parse_csv(tmp_path, ("prompt", "completions", "scores"), *cells)
    assert [(one.row, one.scores) for one in records] == [(0, (1.0, 2.5)), (5, (1.0,))]
    assert records[1].completions == ((bot("a"),),)
    assert [bad.reason for bad in rejected] == ["schema"] * 5
    cells = [("p", "c", "1.0", "2"), ("p", "c", "False", "-1e3"), ("p", "c", "", "1")]
    records, (bad,) = parse_csv(tmp_path, ("prompt", "completion", "label", "margin"), *cells)
    assert [record.roles[0] for record in records] == [Role.DESIRABLE, Role.UNDESIRABLE]
    assert [record.carried["margin"] for record in records] == [2.0, -1000.0]
    assert bad.reason == "schema"


def test_conversations_in_json_text_are_the_same_in_every_format(tmp_path):
    prompt, answer = [user("p")], [bot('say "c"\nplease')]
    texts = {
        "prompt": json.dumps(prompt),
        "completions": json.dumps([json.dumps(answer), "[ ] no list", answer]),
        "scores": "[1, 0, 0.5]",
    }
    values = texts | {"completions": json.loads(texts["completions"]), "scores": [1, 0, 0.5]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(texts)}\n{json.dumps(values)}\n")
    found = [
        *read_file(tmp_path / "a.jsonl")[0],
        *parse_csv(tmp_path, [*texts], [*texts.values()])[0],
        *parse_arrow(tmp_path, pa.Table.from_pylist([texts]))[0],
    ]
    assert len(found) == 4
    for record in found:
        assert record.prompt == (user("p"),)
        assert record.completions == (tuple(answer), (bot("[ ] no list"),), tuple(answer))
        assert record.scores == (1.0, 0.0, 0.5)


def test_structs_of_columnar_files_lose_the_keys_their_row_lacks(tmp_path):
    call, other = {"id": "1", "arguments": {"a": 1}}, {"id": "2", "arguments": {"b": 2}}
    called = {"role": "assistant", "tool_calls": [call, other]}
    tools = [{"name": "f", "strict": True}, {"name": "g"}]
    rows = [
        {"prompt": [user("p") | {"name": "x"}], "chosen": [bot("c")], "rejected": [bot("r")]},
        {"prompt": [user("p")], "chosen": [called], "rejected": [bot("r")], "tools": tools},
    ]
    schema = pa.Table.from_pylist(rows[::-1]).schema
    records, _ = parse_arrow(tmp_path, pa.Table.from_pylist(rows, schema))
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


MAPS = pa.map_(pa.string(), pa.string())


def test_arguments_may_be_a_map_of_arrow(tmp_path):
    table = called([("city", "Oslo"), ("unit", "C")], MAPS)
    (record,), _ = parse_arrow(tmp_path, table)
    assert record.completions[0][0]["tool_calls"][0]["arguments"] == {"city": "Oslo", "unit": "C"}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ([("city", "Oslo"), ("city", "Rome")], MAPS),
        ({"day": date(2024, 1, 1)}, pa.struct([("day", pa.date32())])),
        ({"a": Decimal("1.5")}, pa.struct([("a", pa.decimal128(2, 1))])),
    ],
)
def test_arguments_that_json_lacks_reject_their_row(tmp_path, arguments, kind):
    records, (bad,) = parse_arrow(tmp_path, called(arguments, kind))
    assert (bad.reason, records) == ("schema", [])
    assert "'chosen" in bad.detail


def test_other_arrow_types_are_read_or_reject_their_row(tmp_path):
    scores = [Decimal("1.5"), None, Decimal("2.5")]
    table = pa.table({"prompt": ["p"] * 3, "completion": ["c"] * 3, "score": scores})
    records, rejected = parse_arrow(tmp_path, table)
    assert [record.scores[0] for record in records] == [1.5, 2.5]
    assert rejected[0].reason == "schema"
    days = pa.table({"prompt": [date(2024, 1, 1)], "chosen": [b"c"], "rejected": ["r"]})
    assert parse_arrow(tmp_path, days)[1][0].reason == "schema"
    when = pa.array([0, 2**62], pa.timestamp("us"))  # the second is none that Python has
    pq.write_table(pa.table({"prompt": ["p", "q"], "when": when}), tmp_path / "a.parquet")
    first, second = rows_of(open_inputs([str(tmp_path / "a.parquet")])[0], ["prompt", "when"])
    assert (first["prompt"], second.reason) == ("p", "schema")
    assert "'when'" in second.detail


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


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(COLUMNS), st.booleans(), st.data())
def test_any_row_is_a_record_or_rejected_with_a_reason(tmp_path, columns, is_json, data):
    if is_json:
        rows = data.draw(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(columns, JUNK))))
        lines = [json.dumps(row).encode() for row in rows]
        path, content = tmp_path / "a.jsonl", b"\n".join([json.dumps({}).encode(), *lines])
    else:
        rows = data.draw(
            st.lists(
                st.lists(
                    st.text(st.characters(codec="utf-8", exclude_characters='"\0\r\n'))
                    | st.just("[{"),
                    min_size=1,
                )
            )
        )
        path = tmp_path / "a.csv"
        lines = [",".join(f'"{cell}"' for cell in row) for row in [columns, *rows]]
        content = "\n".join(lines).encode()
    path.write_bytes(content)
    file = InputFile(path, path.suffix, 1)
    records, rejected = parted(text_rows_in(file, shape_of(columns), 0))
    good, bad = [record.row for record in records], [bad.row for bad in rejected]
    assert sorted(good + bad) == list(range(len(rows) + is_json))
    assert (good, bad) == (sorted(good), sorted(bad))
    assert all(bad.reason in REASONS and bad.detail.isprintable() for bad in rejected)
