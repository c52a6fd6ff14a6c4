"""The table of samples: its columns, its order, and that stage 1 reads its conversations back."""

import json

import polars as pl
import pytest

from align.schemas.samples import Prompt, Sample
from align.stages.data.files import open_inputs
from align.stages.data.text_rows import read_prompts
from align.stages.sample.sample_table import sample_table, unique_prompts

TURN = {"role": "user", "content": "hi"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


def table(*prompts, n=1):
    samples = [
        Sample(prompt.key, number, f"{place} {number}", "stop", 3, 4 + number)
        for place, prompt in enumerate(prompts)
        for number in range(n)
    ]
    return sample_table({prompt.key: prompt for prompt in prompts}, samples)


def test_rows_are_in_the_order_of_the_prompts_then_of_the_numbers():
    found = table(Prompt("b"), Prompt("a"), n=2)
    assert found.drop("prompt_key").to_dict(as_series=False) == {
        "prompt": ["b", "b", "a", "a"],
        "number": [0, 1, 0, 1],
        "completion": ["0 0", "0 1", "1 0", "1 1"],
        "finish": ["stop"] * 4,
        "prompt_tokens": [3] * 4,
        "completion_tokens": [4, 5, 4, 5],
    }
    assert found["number"].dtype == pl.Int32
    of_turns = table(Prompt((TURN,)))
    assert of_turns["completion"].to_list() == [[{"role": "assistant", "content": "0 0"}]]


@pytest.mark.parametrize(
    "texts",
    [
        ["text"],
        [(TURN,), (TURN, TURN)],
        [(TURN, CALL, TURN)],  # messages with other keys
        [(TURN,), ({**TURN, "name": "Ann"},)],  # a key that the first message lacks
        ["text", (TURN,)],  # both kinds
    ],
)
def test_prompts_of_any_kind_are_read_back_as_they_were(tmp_path, texts):
    table(*map(Prompt, texts)).write_parquet(tmp_path / "t.parquet")
    columns = {"completion": "", "finish": "", "number": "", "prompt_key": ""}
    rows = read_prompts(open_inputs([str(tmp_path / "t.parquet")]), columns)
    assert [prompt.text for prompt in rows.prompts] == texts


def carried(*values):
    prompts = [Prompt(str(place), carried={"it": value}) for place, value in enumerate(values)]
    return table(*prompts)["it"].to_list()


def test_what_prompts_carry_keeps_its_type_and_other_values_are_text():
    assert carried(4, None) == [4, None]
    assert carried([1, 2], []) == [[1, 2], []]
    assert carried(1, "x") == ["1", "x"]  # with which a completion can be compared


@pytest.mark.parametrize(
    "values", [[[1], [2.5]], [{"a": 1}, {"a": 2, "b": 3}], [{"a": 1}, {"b": 1}], [[{}], [{"a": 1}]]]
)
def test_nothing_inside_of_what_prompts_carry_is_lost(values):
    found = carried(*values)
    assert [json.loads(one) if isinstance(one, str) else one for one in found] == values


def test_tools_and_options_are_columns_where_a_prompt_has_some():
    assert "tools" not in table(Prompt("a")).columns
    found = table(Prompt((TURN,), tools=(CALL,), template_options={"x": 1}), Prompt((TURN,)))
    assert found["chat_template_kwargs"].to_list() == ['{"x": 1}', None]
    assert json.loads(found["tools"][0]) == [CALL]


def test_equal_prompts_are_asked_once_with_what_the_first_carries():
    """What a prompt carries does not tell it from others; its tools and options do."""
    others = [
        Prompt("a", carried={"x": 1}),
        Prompt("b"),
        Prompt((TURN,)),
        Prompt((TURN,), tools=(CALL,)),
        Prompt((TURN,), template_options={"x": 1}),
    ]
    found = unique_prompts([*others, Prompt("a", carried={"x": 2}), Prompt("b")])
    assert [*found.values()] == others
    assert unique_prompts([]) == {}
