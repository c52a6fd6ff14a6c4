"""Prompts of data files of every shape, and what goes with them."""

import pytest

from align.schemas.errors import UsageError
from align.stages.data.chat_wrap import UNWRAPPED, Wrapping
from align.stages.data.input_files import open_inputs
from align.stages.data.prompt_rows import read_prompts
from support.read_rows import bot, user, write_rows

SYSTEM = {"role": "system", "content": "be kind"}


@pytest.fixture
def read(tmp_path):
    """The prompts of files with these rows."""

    def of_files(*files, wrap=UNWRAPPED, **columns):
        for number, rows in enumerate(files):
            write_rows(tmp_path / f"{number}.jsonl", rows)
        return read_prompts(open_inputs([str(tmp_path)]), columns, wrap)

    return of_files


def texts(rows):
    return [prompt.text for prompt in rows.prompts]


def carried(rows):
    return [prompt.carried for prompt in rows.prompts]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"chosen": "b", "rejected": "c"},
        {"completion": "b", "label": True},
        {"completions": ["b", "c"], "scores": [1, 2]},
        {"completion": "b", "score": 1},
        {"completion": "b"},
        {"chosen": None, "rejected": ""},
    ],
)
def test_a_row_with_a_prompt_gives_it_and_carries_nothing_of_preference_data(read, more):
    rows = read([{"prompt": "a"} | more])
    assert (texts(rows), carried(rows)) == (["a"], [{}])


def test_a_prompt_keeps_its_system_message_tools_and_options(read):
    tool = {"type": "function", "function": {"name": "f"}}
    row = {"system": "be kind", "tools": [tool], "chat_template_kwargs": {"thinking": False}}
    chat = read([row | {"prompt": [user("hi")], "answer": 4}])
    text = read([row | {"prompt": "hi", "answer": 4}], wrap=Wrapping(True))
    for (prompt,) in (chat.prompts, text.prompts):
        assert prompt.text == (SYSTEM, user("hi"))
        assert (prompt.tools, prompt.template_options) == ((tool,), {"thinking": False})
        assert prompt.carried == {"answer": 4}


def test_rows_that_cannot_be_used_are_rejected_with_their_place_and_reason(read):
    rows = read([{"prompt": "a"}, {"prompt": " "}, {"prompt": None}, {"prompt": 3}])
    assert (texts(rows), rows.rows_in) == (["a"], 4)
    assert [(bad.row, bad.reason) for bad in rows.rejected] == [
        (1, "empty_prompt"),
        (2, "null"),
        (3, "schema"),
    ]


def test_files_carry_what_any_of_them_has_but_what_is_left_out_or_the_tables_own(read):
    row = {"prompt": "a", "number": 3, "finish": "stop", "x": 1, "y": 2}
    rows = read([row], [{"prompt": "b", "z": 3}], x="")
    assert carried(rows) == [{"y": 2, "z": None}, {"y": None, "z": 3}]
    assert rows.not_carried == ("number", "finish")


def test_pairs_without_a_prompt_give_what_both_begin_with_and_carry_the_rest(read):
    row = {"chosen": "a b", "rejected": "a c", "margin": 1, "x": 1, "answer": "b"}
    found = read([row, row, row | {"answer": "\ud800"}], x="")
    assert (texts(found), carried(found)) == (["a"] * 2, [{"answer": "b"}] * 2)
    assert [(bad.row, bad.reason) for bad in found.rejected] == [(2, "bad_utf8")]
    chats = {name: [user("hi"), bot(name)] for name in ("chosen", "rejected")}
    assert texts(read([chats])) == [(user("hi"),)]


@pytest.mark.parametrize("start", [{"prompt": "a"}, {"chosen": "a b", "rejected": "a c"}])
def test_a_key_that_the_first_rows_lack_is_carried_too(read, start):
    late = {"answer": "b", "number": 3, "score_chosen": 2}
    found = read([*[start] * 200, start | late])
    assert texts(found) == ["a"] * 201
    assert carried(found) == [{}] * 200 + [{"answer": "b"}]
    assert found.not_carried == ("number",)


def test_files_without_a_prompt_by_its_name_are_refused_with_the_way_on(read):
    for row, message in (
        ({"instruction": "a", "answer": "b"}, "none of prompts.*--map prompt=instruction"),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "--map prompt=question"),
    ):
        with pytest.raises(UsageError, match=message):
            read([row])
    with pytest.raises(UsageError, match="one has prompts and the other has none"):
        read([{"prompt": "a"}], [{"chosen": "a b", "rejected": "a c"}])
