"""Prompts of data files of every shape, and what goes with them."""

import json

import polars as pl
import pytest

from align.schemas.errors import UsageError
from align.stages.data.input_files import open_inputs
from align.stages.data.prompt_rows import read_prompts

USER = {"role": "user", "content": "hi"}


def read(path, columns=None):
    return read_prompts(open_inputs([str(path)]), columns or {})


def jsonl(folder, *rows, name="data.jsonl"):
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def texts(rows):
    return [prompt.text for prompt in rows.prompts]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completions": ["b", "c"], "scores": [1, 2]},
        {"prompt": "a", "completion": "b", "score": 1},
        {"prompt": "a", "completion": "b"},
    ],
)
def test_a_file_with_a_prompt_gives_it_and_carries_nothing_of_preference_data(tmp_path, row):
    (prompt,) = read(jsonl(tmp_path, row)).prompts
    assert prompt.text == "a"
    assert not prompt.carried


def test_a_bad_completion_does_not_matter_to_a_prompt(tmp_path):
    rows = read(jsonl(tmp_path, {"prompt": "a", "chosen": None, "rejected": ""}))
    assert texts(rows) == ["a"]


def test_pairs_without_a_prompt_give_what_both_begin_with(tmp_path):
    chosen, rejected = (
        [USER, {"role": "assistant", "content": "x"}],
        [
            USER,
            {"role": "assistant", "content": "y"},
        ],
    )
    rows = read(jsonl(tmp_path, {"chosen": chosen, "rejected": rejected}))
    assert texts(rows) == [(USER,)]


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json", "csv", "arrow"])
def test_every_format_gives_prompts_and_what_they_carry(tmp_path, ending):
    frame = pl.DataFrame({"question": ["a", "b"], "answer": ["1", "2"]})
    path = tmp_path / f"data.{ending}"
    match ending:
        case "parquet":
            frame.write_parquet(path)
        case "arrow":
            frame.write_ipc_stream(path)
        case "csv":
            frame.write_csv(path)
        case "json":
            path.write_text(json.dumps(frame.to_dicts()))
        case "jsonl":
            frame.write_ndjson(path)
    rows = read(path, {"prompt": "question"})
    assert texts(rows) == ["a", "b"]
    assert [prompt.carried for prompt in rows.prompts] == [{"answer": "1"}, {"answer": "2"}]


def test_a_conversation_keeps_its_system_message_tools_and_options(tmp_path):
    tool = {"type": "function", "function": {"name": "f"}}
    row = {
        "prompt": [USER],
        "system": "be kind",
        "tools": [tool],
        "chat_template_kwargs": {"thinking": False},
        "answer": 4,
    }
    (prompt,) = read(jsonl(tmp_path, row)).prompts
    assert prompt.text == ({"role": "system", "content": "be kind"}, USER)
    assert prompt.tools == (tool,)
    assert prompt.template_options == {"thinking": False}
    assert prompt.carried == {"answer": 4}


def test_rows_that_cannot_be_used_are_rejected_with_their_place_and_reason(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": " "}, {"prompt": None}, {"prompt": 3})
    rows = read(path)
    assert texts(rows) == ["a"]
    assert [(row.row, row.reason) for row in rows.rejected] == [
        (1, "empty_prompt"),
        (2, "null"),
        (3, "schema"),
    ]
    assert rows.rows_in == 4


def test_a_column_left_out_is_not_carried_and_one_of_the_table_is_reported(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a", "number": 3, "finish": "stop", "x": 1, "y": 2})
    rows = read(path, {"x": ""})
    assert rows.prompts[0].carried == {"y": 2}
    assert rows.not_carried == ("number", "finish")


def test_files_carry_what_any_of_them_has(tmp_path):
    jsonl(tmp_path, {"prompt": "a", "x": 1}, name="1.jsonl")
    jsonl(tmp_path, {"prompt": "b", "y": 2}, name="2.jsonl")
    rows = read(tmp_path)
    assert [prompt.carried for prompt in rows.prompts] == [{"x": 1, "y": None}, {"x": None, "y": 2}]


def test_a_file_without_prompts_is_refused_with_the_way_on(tmp_path):
    with pytest.raises(UsageError, match="none of prompts.*--map prompt=instruction"):
        read(jsonl(tmp_path, {"instruction": "a", "answer": "b"}))


def test_pairs_that_have_a_prompt_of_another_name_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--map prompt=question"):
        read(jsonl(tmp_path, {"question": "a", "chosen": "b", "rejected": "c"}))


def test_pairs_without_a_prompt_carry_what_is_no_part_of_them(tmp_path):
    rows = [{"chosen": "a b", "rejected": "a c", "margin": 1, "x": 1, "answer": "b"}] * 2
    bad = rows[0] | {"answer": "\ud800"}
    found = read(jsonl(tmp_path, *rows, bad), {"x": ""})
    assert [prompt.carried for prompt in found.prompts] == [{"answer": "b"}] * 2
    assert [(row.row, row.reason) for row in found.rejected] == [(2, "bad_utf8")]


@pytest.mark.parametrize("start", [{"prompt": "a"}, {"chosen": "a b", "rejected": "a c"}])
def test_a_key_that_the_first_rows_lack_is_carried_too(tmp_path, start):
    late = {"answer": "b", "number": 3, "score_chosen": 2}
    found = read(jsonl(tmp_path, *[start] * 200, start | late))
    assert texts(found) == ["a"] * 201
    assert [prompt.carried for prompt in found.prompts] == [{}] * 200 + [{"answer": "b"}]
    assert found.not_carried == ("number",)


def test_files_with_and_without_prompts_are_not_mixed(tmp_path):
    jsonl(tmp_path, {"prompt": "a"}, name="1.jsonl")
    jsonl(tmp_path, {"chosen": "a b", "rejected": "a c"}, name="2.jsonl")
    with pytest.raises(UsageError, match="one has prompts and the other has none"):
        read(tmp_path)
