"""No column of text is left unread in silence; prompts of any shape, and what goes with them."""

import json
from collections import Counter
from decimal import Decimal

import pytest

from align.schemas.errors import UsageError
from align.stages.data.chat_wrap import UNWRAPPED, Wrapping
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.free_text import ColumnSample, Watch, holds_phrase
from align.stages.data.input_files import iter_chunks, open_inputs
from align.stages.data.prompt_rows import read_prompts
from align.stages.data.unread_columns import counts_of, require_read, require_watched_read
from support.read_rows import bot, user, write_rows

ENDINGS = ("parquet", "arrow", "jsonl", "json", "csv")
NOUNS = ["door", "wall", "hill", "river", "stone", "cloud"]


def text(number):
    return f"the {NOUNS[number % 6]} behind the {NOUNS[number // 6 % 6]}, seen {number} times"


def pair(number, **more):
    return {"prompt": f"Which {number}?", "chosen": " this", "rejected": " that", **more}


@pytest.fixture
def written(tmp_path):
    """A file with these rows."""
    return lambda rows, ending="jsonl", **options: write_rows(
        tmp_path / f"a.{ending}", rows, **options
    )


def opened(*paths, **columns):
    """The files' shape once every row was looked at as stage 1 does, and what came late."""
    inputs = open_inputs(list(map(str, paths)))
    shape = require_read(inputs, common_shape(inputs, columns))
    watch = Watch(shape.unwatched)
    for chunk in iter_chunks(inputs, shape.columns):
        parse_chunk(chunk, shape, watch)
    notes = Counter(counts_of(watch))
    late = require_watched_read(inputs, shape, notes)
    assert not notes
    return shape, late


def refusal(*paths, **columns):
    with pytest.raises(UsageError) as caught:
        opened(*paths, **columns)
    return str(caught.value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_part_of_a_prompt_is_refused_wherever_it_is_and_an_empty_column_is_not(written, ending):
    rows = [
        {"instruction": f"Say {n}.", "input": "", "completion": f" {n}", "label": True}
        for n in range(3000)
    ]
    shape, _ = opened(written(rows, ending), prompt="instruction")
    assert shape.source["prompt"] == "instruction"
    rows[2345]["input"] = "7"
    said = refusal(written(rows, ending), prompt="instruction")
    assert "'input' beside 'instruction'" in said
    assert "--map input=" in said
    assert opened(written(rows, ending), prompt="instruction", input="")


@pytest.mark.parametrize("ending", ENDINGS)
def test_pictures_are_refused_and_an_empty_column_of_them_is_not(written, ending):
    rows = [pair(n, images=None) for n in range(20)]
    opened(written(rows, ending))
    rows[7]["images"] = "a.png"
    assert "--map images=" in refusal(written(rows, ending))
    opened(written(rows, ending), images="")


@pytest.mark.parametrize("ending", ENDINGS)
def test_text_that_nothing_reads_is_refused_with_both_ways_on_and_both_go(written, ending):
    rows = [pair(n, system_prompt=text(n), input=text(n + 1), source="math") for n in range(20)]
    path = written(rows, ending)
    said = refusal(path)
    for part in ("system=system_prompt", "system_prompt=", "input="):
        assert f"--map {part}" in said
    assert path in said
    assert text(1) in said
    assert "source" not in said
    assert "--map system_prompt=" not in refusal(path, system="system_prompt")
    shape, late = opened(path, system="system_prompt", input="")
    assert (shape.noted, late) == (("source",), ())


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_no_text_is_noted_and_not_refused(written, ending):
    more = {"id": "a1b2", "url": "https://a.org/x y", "n": 3, "kind": "open", "none": None}
    path = written([pair(n, **more) for n in range(20)], ending)
    assert {*opened(path)[0].noted} == {"id", "url", "n", "kind"}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("before", [{}, {"input": ""}, {"input": "<none>"}])
def test_text_that_begins_behind_the_first_rows_is_refused(written, ending, before):
    rows = [pair(n, **before) for n in range(3000)]
    path = written(rows + [pair(n, input=text(n)) for n in range(3000, 3020)], ending)
    assert "--map input=" in refusal(path)
    assert opened(path, input="")


def test_a_late_text_is_named_with_its_row_and_may_be_read(written):
    path = written([*map(pair, range(3000)), pair(3000, system_note=text(0), turn=3)])
    said = refusal(path)
    assert "row 3,000" in said
    assert "--map system=system_note" in said
    shape, late = opened(path, system="system_note")
    assert (shape.source["system"], late) == ("system_note", ("turn",))
    assert "no column 'inputs'" in refusal(path, inputs="")  # a name that no row has
    pairs = [{"chosen": "a b", "rejected": "a c", "asked": text(n)} for n in range(9)]
    assert "--map prompt=asked" in refusal(written(pairs))


def test_a_column_of_one_of_several_files_is_read_or_left_out_in_all(tmp_path):
    first = write_rows(tmp_path / "a.jsonl", [pair(n) for n in range(9)])
    rows = [pair(n, system_prompt=text(n)) for n in range(9)]
    files = (first, write_rows(tmp_path / "b.jsonl", rows))
    assert "b.jsonl" in refusal(*files)
    assert opened(*files, system_prompt="")[0].noted == ()
    shape, _ = opened(*files, system="system_prompt")
    assert (shape.source["system"], shape.optional) == ("system_prompt", ("system",))


def test_text_anywhere_in_a_parquet_file_is_found_by_where_its_column_has_data(written):
    rows = [pair(n, note=text(n) if n == 2500 else None) for n in range(5000)]
    assert "'note'" in refusal(written(rows, "parquet", row_group_size=20))
    rows[2501]["note"] = text(1)
    assert "'note'" in refusal(written(rows, "parquet", row_group_size=5000))


def is_free_text(*cells):
    sample = ColumnSample()
    for cell in cells:
        sample.add(cell, "a.csv")
    return sample.is_free_text


MESSAGE = {"role": "user", "content": "Hi"}

TEXT = {
    "three words, each time others": ["the red door", "the dog barks", "over the hill"],
    "one system message for all": ["You are a helpful assistant."] * 9,
    "a short one, ended as a sentence is": ["Be brief."] * 9,
    "five words that repeat": ["answer as the pirate would"] * 9,
    "mostly empty": [""] * 90 + [None, [], "the red door", "over the hill"],
    "code": ["for i in range(10): print(i) # show the numbers", "SELECT name FROM people WHERE id"],
    "no blanks between words": ["天空是什么颜色的", "哪个数更大一些呢"],
    "lists of texts": [["the red door", "the dog barks"], ["over the hill"]],
    "lists of turns": [[["What is it?", "A red door."]], [["Who barks?", "The dog does."]]],
    "messages": [[MESSAGE], [MESSAGE]],
    "messages of ShareGPT": [[{"from": "human", "value": "Hi"}]],
    "messages in JSON text": [json.dumps([MESSAGE])],
    "one key of an object": [{"why": "the red door"}, {"why": "the dog barks"}],
}
NO_TEXT = {
    "nothing": [None, "", "  ", [], {}, "[]"],
    "numbers": [1, 2.5, Decimal("3.5"), True, "12", "1,024", [0.5, 0.25]],
    "ids": [f"{number:032x}" for number in range(9)],
    "names of models": [["gpt4_1106_preview", "vicuna-7b-v1.5"], ["claude-2.1"]] * 9,
    "addresses": ["https://a.org/one/two/three b c", "https://b.org/x http://c.org/y"],
    "dates": ["2024-01-05 12:30:00 UTC", "Fri, 05 Jan 2024 12:30:00 +0000", "January 5, 2024"],
    "objects of such": [{"id": "a", "when": "2024-01-05", "n": 3}, {"id": "b", "when": "", "n": 4}],
    "bytes": [b"the red door", b"over the hill"],
    "names in Chinese": ["王小明", "李四", "欧阳修"],
}


@pytest.mark.parametrize("name", [*TEXT, *NO_TEXT])
def test_text_is_free_text_and_what_is_none_is_not(name):
    cells = (TEXT | NO_TEXT)[name]
    assert is_free_text(*cells) == (name in TEXT)
    assert name in NO_TEXT or any(map(holds_phrase, cells))


def test_nesting_without_end_is_no_text():
    deep = []
    for _ in range(10_000):
        deep = [deep]
    assert not is_free_text(deep)
    assert not is_free_text("[" * 10_000)


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
