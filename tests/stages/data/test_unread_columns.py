"""No column of text is left unread in silence, in any format and wherever its text begins."""

import json
from collections import Counter
from decimal import Decimal

import pytest

from align.schemas.errors import UsageError
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.free_text import ColumnSample, Watch, holds_phrase
from align.stages.data.input_files import iter_chunks, open_inputs
from align.stages.data.unread_columns import counts_of, require_read, require_watched_read
from support.read_rows import write_rows

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


def test_text_in_a_column_of_bytes_is_text_and_a_picture_is_none(written):
    rows = [pair(n, note=text(n).encode(), picture=b"\xff\xd8" + bytes(n)) for n in range(60)]
    said = refusal(written(rows, "parquet"))
    assert "'note'" in said
    assert "'picture'" not in said


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
