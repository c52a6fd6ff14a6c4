"""The table of samples: its columns, its order, and that stage 1 reads its conversations back."""

import json

import polars as pl
import pytest

from align.schemas.samples import Prompt, Sample
from align.stages.data.input_files import open_inputs
from align.stages.data.prompt_rows import read_prompts
from align.stages.sample.prompts import asked_once, groups_of
from align.stages.sample.sample_table import sample_table

TURN = {"role": "user", "content": "hi"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


def table(*prompts, n=2):
    asked = {prompt.key: prompt for prompt in prompts}
    samples = {
        (key, number): Sample(key, number, f"{place} {number}", "stop", 3, 4 + number)
        for place, key in enumerate(asked)
        for number in range(n)
    }
    return sample_table(asked, samples, n)


def read_back(tmp_path, frame):
    frame.write_parquet(tmp_path / "t.parquet")
    columns = {"completion": "", "finish": "", "number": "", "prompt_key": ""}
    rows = read_prompts(open_inputs([str(tmp_path / "t.parquet")]), columns)
    return [prompt.text for prompt in rows.prompts]


def test_rows_are_in_the_order_of_the_prompts_then_of_the_numbers():
    found = table(Prompt("b"), Prompt("a"))
    assert found.columns == [
        "prompt", "prompt_key", "number", "completion", "finish", "prompt_tokens",
        "completion_tokens",
    ]  # fmt: skip
    assert found["prompt"].to_list() == ["b", "b", "a", "a"]
    assert found["completion"].to_list() == ["0 0", "0 1", "1 0", "1 1"]
    assert found["number"].dtype == pl.Int32
    assert found["completion_tokens"].to_list() == [4, 5, 4, 5]


def test_the_completion_of_a_conversation_is_one_message():
    found = table(Prompt((TURN,)), n=1)
    assert found["prompt"].to_list() == [[TURN]]
    assert found["completion"].to_list() == [[{"role": "assistant", "content": "0 0"}]]


@pytest.mark.parametrize(
    "prompts",
    [
        [("text",)],
        [((TURN,),), ((TURN, TURN),)],
        [((TURN, CALL, TURN),)],  # messages with other keys
        [((TURN,),), (({**TURN, "name": "Ann"},),)],  # a key that the first message lacks
        [("text",), ((TURN,),)],  # both kinds
    ],
)
def test_prompts_of_any_kind_are_read_back_as_they_were(tmp_path, prompts):
    wanted = [text for (text,) in prompts]
    found = table(*(Prompt(text) for text in wanted), n=1)
    assert read_back(tmp_path, found) == wanted


def test_what_prompts_carry_keeps_its_type_and_other_values_are_text():
    found = table(
        Prompt("a", carried={"answer": 4, "mixed": 1, "list": [1, 2]}),
        Prompt("b", carried={"answer": None, "mixed": "x", "list": []}),
        n=1,
    )
    assert found["answer"].to_list() == [4, None]
    assert found["mixed"].to_list() == ["1", "x"]  # with which a completion can be compared
    assert found["list"].to_list() == [[1, 2], []]


@pytest.mark.parametrize(
    "values", [[[1], [2.5]], [{"a": 1}, {"a": 2, "b": 3}], [{"a": 1}, {"b": 1}], [[{}], [{"a": 1}]]]
)
def test_nothing_inside_of_what_prompts_carry_is_lost(values):
    prompts = [Prompt(str(place), carried={"it": value}) for place, value in enumerate(values)]
    found = table(*prompts, n=1)["it"].to_list()
    assert [json.loads(one) if isinstance(one, str) else one for one in found] == values


def test_tools_and_options_are_columns_where_a_prompt_has_some():
    assert "tools" not in table(Prompt("a")).columns
    found = table(Prompt((TURN,), tools=(CALL,), template_options={"x": 1}), Prompt((TURN,)), n=1)
    assert found["chat_template_kwargs"].to_list() == ['{"x": 1}', None]
    assert found["tools"][0].startswith('[{"role": "assistant"')


def test_equal_prompts_are_asked_once_with_what_the_first_carries():
    asked = asked_once([Prompt("a", carried={"x": 1}), Prompt("b"), Prompt("a", carried={"x": 2})])
    assert [prompt.text for prompt in asked.by_key.values()] == ["a", "b"]
    assert asked.repeated == 1
    assert next(iter(asked.by_key.values())).carried == {"x": 1}
    assert asked_once([]).repeated == 0


def test_prompts_differ_by_tools_and_options_and_not_by_what_they_carry():
    same = {Prompt("a").key, Prompt("a", carried={"x": 1}).key}
    assert len(same) == 1
    others = [
        Prompt("a"),
        Prompt("b"),
        Prompt((TURN,)),
        Prompt((TURN,), tools=(CALL,)),
        Prompt((TURN,), template_options={"x": 1}),
    ]
    assert len({prompt.key for prompt in others}) == len(others)


def test_groups_are_the_same_for_any_order_and_hold_prompts_of_like_length():
    prompts = [Prompt("x" * length) for length in (5, 1, 4, 2, 3)]
    groups = groups_of(prompts, 2)
    assert [[len(one.text) for one in group] for group in groups] == [[1, 2], [3, 4], [5]]
    assert groups_of(prompts[::-1], 2) == groups
