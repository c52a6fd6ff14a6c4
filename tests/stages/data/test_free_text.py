"""Free text in cells that nothing reads is told from ids, numbers, dates and labels."""

import json
from datetime import datetime
from decimal import Decimal

import pytest

from align.stages.data.free_text import ColumnSample, Watch, holds_phrase


def is_free_text(*cells):
    sample = ColumnSample()
    for cell in cells:
        sample.add(cell, "a.csv")
    return sample.is_free_text


USER = {"role": "user", "content": "Hi"}

TEXT = {
    "three words, each time others": ["the red door", "the dog barks", "over the hill"],
    "half of the cells differ": ["the red door", "over the hill", "the red door", "over the hill"],
    "one system message for all": ["You are a helpful assistant."] * 9,
    "a short one, ended as a sentence is": ["Be brief."] * 9,
    "five words that repeat": ["answer as the pirate would"] * 9,
    "one row": ["Translate what follows into French."],
    "mostly empty": [""] * 90 + [None, [], "the red door", "over the hill"],
    "beside a filler": ["<none>"] * 90 + ["the red door", "over the hill"],
    "text that begins as a list": ["[1] see the red door", "[2] look over the hill"],
    "with figures": ["Which is larger, 7 or 9?", "There are 12 months in 1 year"],
    "code": ["for i in range(10): print(i) # show the numbers", "SELECT name FROM people WHERE id"],
    "no blanks between words": ["天空是什么颜色的", "哪个数更大一些呢"],
    "lists of texts": [["the red door", "the dog barks"], ["over the hill"]],
    "lists of turns": [[["What is it?", "A red door."]], [["Who barks?", "The dog does."]]],
    "messages": [[USER], [USER]],
    "messages of ShareGPT": [[{"from": "human", "value": "Hi"}]],
    "messages in JSON text": [json.dumps([USER])],
    "messages inside of an object": [{"id": 1, "talk": [USER]}],
    "one key of an object": [
        {"id": "a", "why": "the red door"},
        {"id": "b", "why": "the dog barks"},
    ],
}
NO_TEXT = {
    "nothing": [None, "", "  ", [], {}, "[]"],
    "numbers": [1, 2.5, Decimal("3.5"), True, "12", "1,024", [0.5, 0.25]],
    "words alone": ["Ann", "Ben", "Ann", "Zoë"],
    "two words": ["machine learning", "set theory", "open mind"],
    "labels of three words": ["open book answers", "closed book answers"] * 9,
    "ids": [f"{number:032x}" for number in range(9)],
    "names of models": [["gpt4_1106_preview", "vicuna-7b-v1.5"], ["claude-2.1"]] * 9,
    "addresses": ["https://a.org/one/two/three b c", "https://b.org/x http://c.org/y"],
    "dates": ["2024-01-05 12:30:00 UTC", "Fri, 05 Jan 2024 12:30:00 +0000", "January 5, 2024"],
    "times": [datetime(2024, 1, 5), datetime(2024, 2, 6)],
    "objects of such": [{"id": "a", "when": "2024-01-05", "n": 3}, {"id": "b", "when": "", "n": 4}],
    "bytes": [b"the red door", b"over the hill"],
    "names in Chinese": ["王小明", "李四", "欧阳修"],
    "a label in one row": ["open book answers"],
}


@pytest.mark.parametrize("name", TEXT)
def test_text_is_free_text(name):
    assert is_free_text(*TEXT[name])
    assert any(map(holds_phrase, TEXT[name]))


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_none(name):
    assert not is_free_text(*NO_TEXT[name])


def test_three_words_are_text_where_they_differ_and_five_where_they_do_not():
    assert not is_free_text(*["red door"] * 8, *["blue wall"] * 8)
    assert not is_free_text(*["the red door"] * 8, *["a blue wall"] * 8)
    assert not is_free_text(*["over the red door"] * 8)
    assert is_free_text(*["over the old red door"] * 8)


def test_text_is_half_of_the_values_that_differ():
    names = ["Ann", "Ben", "Cleo"]
    assert is_free_text(*names, "the red door", "over the hill", "the dog barks")
    assert not is_free_text(*names, "the red door", "over the hill")


def test_nesting_without_end_is_no_text():
    deep = []
    for _ in range(10_000):
        deep = [deep]
    assert not is_free_text(deep)
    assert not is_free_text("[" * 10_000)


def test_a_watch_tells_columns_with_words_from_others_and_forgets_what_is_known():
    watch = Watch(frozenset(["prompt"]))
    watch.look({"prompt": "the red door", "id": "a1", "why": "", "when": None})
    watch.look({"prompt": "over the hill", "id": "the red door", "why": "over the hill"})
    watch.look({"prompt": "a", "turn": 3, "why": ""})
    assert watch.met == {"id": True, "why": True, "turn": False}
