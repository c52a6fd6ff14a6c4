"""What a prompt is known by, and what that ignores."""

import random
import string
from dataclasses import replace

import numpy as np
import pytest

from align.schemas import row_keys as module
from align.schemas.row_keys import prompt_keys_of, sketches_of
from align.schemas.rows import Record, Role
from align.stages.feed.train_source import count_near

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "What is the capital of France?"}
TOLD = {"role": "assistant", "content": "Paris."}
AGAIN = {"role": "user", "content": "And of Spain?"}
TOOL = {"type": "function", "function": {"name": "look_up"}}
CHAT = Record(0, 0, (SYSTEM, ASKED, TOLD, AGAIN), ("x",), (Role.CANDIDATE,), (None,))
TEXT = replace(CHAT, prompt="Q: What is the capital of France?\nA:")


def changed(message, **fields):
    return {**message, **fields}


def chat(*, system=SYSTEM, asked="What is the capital of France?", role="user", rest=(TOLD, AGAIN)):
    return (system, {"role": role, "content": asked}, *rest)


SAME_SIDE = {
    "another system message": (CHAT, chat(system=changed(SYSTEM, content="Be kind."))),
    "no system message": (CHAT, (ASKED, TOLD, AGAIN)),
    "white space": (CHAT, chat(asked="  What is\tthe capital of France?\n")),
    "white space in text": (TEXT, "Q:  What is the capital\nof France? A: "),
}
OTHER_SIDE = {
    "a word": (CHAT, chat(asked="What is the capital of Spain?")),
    "who says it": (CHAT, chat(role="assistant")),
    "a turn less": (CHAT, (SYSTEM, ASKED)),
    "two turns in one": (CHAT, chat(asked="What is the capital of France? Paris.", rest=(AGAIN,))),
    "a word of text": (TEXT, "Q: What is the capital of Spain?\nA:"),
    "a blank within a word": (TEXT, "Q: What is the cap ital of France?\nA:"),
}


@pytest.mark.parametrize("name", [*SAME_SIDE, *OTHER_SIDE])
def test_prompts_are_other_ones_and_on_one_side_of_the_split_or_not_that_differ_in(name):
    record, prompt = (SAME_SIDE | OTHER_SIDE)[name]
    keys = prompt_keys_of([record, replace(record, prompt=prompt)])
    assert keys.prompt[0] != keys.prompt[1]
    assert (keys.split[0] == keys.split[1]) == (name in SAME_SIDE)


def test_tools_and_template_options_make_another_prompt_and_completions_and_key_order_do_not():
    turned = tuple(dict(reversed(message.items())) for message in CHAT.prompt)
    same = replace(CHAT, prompt=turned, completions=("y",), row=7, scores=(1.0,))
    others = [replace(CHAT, tools=(TOOL,)), replace(CHAT, template_options={"thinking": False})]
    keys = prompt_keys_of([CHAT, same, *others])
    assert keys.prompt[0] == keys.prompt[1]
    assert len(set(keys.prompt)) == 3
    assert len(set(keys.split)) == 1
    told = replace(CHAT, prompt=(changed(SYSTEM, content="Tell a story."),))
    assert len(set(prompt_keys_of([replace(CHAT, prompt=(SYSTEM,)), told]).split)) == 2


def test_these_keys_never_change():
    """Else prompts would cross the split from one version to another."""
    keys = prompt_keys_of([CHAT, TEXT])
    assert [key.hex() for key in keys.prompt.tolist()] == [
        "5b1e64fe0e211ea8f0dad9dc73a24613",
        "4f743367ee26abbbe649c9f469217e84",
    ]
    assert [f"{int(key):016x}" for key in keys.split] == ["95af2ee0f0ebd776", "0b10a4cb61633113"]
    assert [f"{int(key):016x}" for key in keys.sketch] == ["d68ffded9dbef122", "3d8ffe6b9dc7f122"]


def words(draw, count):
    return [
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(count)
    ]


def near(first, second):
    """Whether the second text counts as a near-duplicate of the first."""
    both = sketches_of([first, second], otherwise=np.array([1, 2], dtype=np.uint64))
    return count_near(both[1:], both[:1]) == 1


def found(pairs):
    return sum(near(*pair) for pair in pairs) / len(pairs)


def edited(draw, text, edits):
    for _ in range(edits):
        text = [*text]
        text[draw.randrange(len(text))] = words(draw, 1)[0]
    return text


def found_after(change, *, length, count=300):
    """The share of texts of so many words that are near to what such a change makes of them."""
    draw = random.Random(length)
    texts = [words(draw, length) for _ in range(count)]
    return found([(" ".join(text), " ".join(change(draw, text))) for text in texts])


def test_texts_are_near_as_far_as_their_words_are_the_same():
    assert found_after(lambda _, text: [f"{word.title()}," for word in text], length=12) == 1
    # 58 of 62 pairs of words are in both: P(at least 6 of 8) = 0.99
    assert found_after(lambda draw, text: edited(draw, text, 1), length=60) > 0.95
    # about a seventh of the pairs of words are in both
    assert found_after(lambda draw, text: [*text[:15], *words(draw, 15)], length=30) < 0.05
    pairs = [(f"What is {i} and {i % 97}?", f"What is {i + 1} and {i % 89}?") for i in range(300)]
    assert found(pairs) < 0.05


def test_unrelated_texts_are_never_near():
    draw = random.Random(4)
    texts = [" ".join(words(draw, draw.randint(1, 40))) for _ in range(4000)]
    sketches = sketches_of(texts, otherwise=np.arange(4000, dtype=np.uint64))
    assert count_near(sketches[:2000], sketches[2000:]) == 0


def test_scripts_without_blanks_are_compared_letter_by_letter():
    text = "日本の首都はどこにありますか、そしてその人口はどのくらいですか"
    assert near(text, f"{text}!")
    assert near(text, text.replace("、", ""))
    assert not near(text, "フランスで一番長い川の名前を教えてください、お願いします")


def test_texts_without_words_are_near_to_themselves_alone():
    texts = ["?!", "...", "", "?!"]
    sketches = sketches_of(texts, otherwise=np.array([7, 8, 9, 7], dtype=np.uint64))
    assert sketches.tolist() == [7, 8, 9, 7]


def test_a_sketch_does_not_depend_on_the_texts_around_it(monkeypatch):
    draw = random.Random(5)
    texts = [" ".join(words(draw, draw.randint(0, 30))) for _ in range(50)]
    otherwise = np.arange(50, dtype=np.uint64)
    together = sketches_of(texts, otherwise=otherwise)
    monkeypatch.setattr(module, "CHARACTERS_AT_ONCE", 100)
    assert sketches_of(texts, otherwise=otherwise).tolist() == together.tolist()
