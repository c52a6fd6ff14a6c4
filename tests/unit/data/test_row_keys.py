"""What a row and a prompt are known by, what that ignores, and lists as lists are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from align.schemas.rows import Role, TextRow, allowed_gaps
from align.schemas.samples import Prompt
from align.stages.data.row_keys import key_rows, prompt_keys_of, split_keys_of
from support.encoded_rows import encoded, plain, record_lists

ROW = encoded(
    [1, 2],
    [3],
    [4, 5],
    roles=(Role.CANDIDATE, Role.CANDIDATE),
    scores=(0.5, 1.0),
    carried={"weight": 1.0},
)


def only(record):
    (row,) = plain(key_rows([record], carried=tuple(record.text_row.carried)))
    return row


def with_record(**changes):
    return replace(ROW, text_row=replace(ROW.text_row, **changes))


CHANGES = {
    "the boundary": replace(ROW, prompt=[1], completions=([2, 3], [4, 5])),
    "where one completion ends": replace(ROW, completions=([3, 4], [5])),
    "a role": with_record(roles=(Role.CANDIDATE, Role.CHOSEN)),
    "no scores": with_record(scores=(None, None)),
    "nothing carried": with_record(carried={}),
    "scores carried instead": with_record(
        scores=(None, None), carried={"a": 0.5, "b": 1.0, "c": 1.0}
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_row_id_changes_with(name):
    assert only(CHANGES[name]).row_id != only(ROW).row_id


def test_a_row_is_placed_by_its_prompts_hash():
    assert only(with_record(file=3, row=99)).row_id == only(ROW).row_id
    assert only(ROW).place == int.from_bytes(only(ROW).prompt_keys[0][:8], "big")


@settings(max_examples=60)
@given(record_lists(with_scores=True))
def test_ids_and_keys_are_equal_exactly_where_contents_are(records):
    rows = plain(key_rows(records, carried=("weight",)))
    contents = [(row.prompt, row.completions, row.carried) for row in rows]
    assert len(set(contents)) == len({row.row_id for row in rows})
    assert len(set(zip(contents, [row.row_id for row in rows], strict=True))) == len(set(contents))
    pairs = {(row.prompt, row.place) for row in rows}
    assert len(pairs) == len({row.prompt for row in rows}) == len({row.place for row in rows})
    texts = {
        (completion[0], key)
        for row in rows
        for completion, key in zip(row.completions, row.completion_keys, strict=True)
    }
    assert len(texts) == len({text for text, _ in texts}) == len({key for _, key in texts})
    for row, source in zip(rows, records, strict=True):  # what the records held
        assert row.source == (source.text_row.file, source.text_row.row)
        assert row.prompt == tuple(source.prompt)
        assert row.carried == (source.text_row.carried["weight"],)
        completions = zip(
            source.completions, source.text_row.roles, source.text_row.scores, strict=True
        )
        assert row.completions == tuple(
            (tuple(ids), int(r), s, len(ids)) for ids, r, s in completions
        )


def test_scores_may_differ_by_what_their_tokens_may():
    lengths = np.array([1, 100])
    # By sequence: 1e-4 at least; by token: 1e-5 in float32 and 2e-2 in bfloat16, the coarser.
    assert allowed_gaps(lengths, "float32") == pytest.approx([1e-4, 1e-3], rel=1e-12)
    assert allowed_gaps(lengths, "float32", "bfloat16") == pytest.approx([2e-2, 2], rel=1e-12)


SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "What is the capital of France?"}
TOLD = {"role": "assistant", "content": "Paris."}
AGAIN = {"role": "user", "content": "And of Spain?"}
TOOL = {"type": "function", "function": {"name": "look_up"}}
CHAT = TextRow(0, 0, (SYSTEM, ASKED, TOLD, AGAIN), ("x",), (Role.CANDIDATE,), (None,))
TEXT = replace(CHAT, prompt="Q: What is the capital of France?\nA:")


def changed(message, **fields):
    return {**message, **fields}


def chat(*, system=SYSTEM, asked="What is the capital of France?", role="user", rest=(TOLD, AGAIN)):
    return (system, {"role": role, "content": asked}, *rest)


# Each beside the conversation, or beside the text.
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
def test_prompts_are_other_ones_and_on_one_side_or_not_that_differ_in(name):
    record, prompt = (SAME_SIDE | OTHER_SIDE)[name]
    one, other = prompt_keys_of([record, replace(record, prompt=prompt)])
    assert one != other
    mine, theirs = split_keys_of([record.prompt, prompt])
    assert (mine == theirs) == (name in SAME_SIDE)


def test_tools_and_template_options_make_another_prompt():
    turned = tuple(dict(reversed(message.items())) for message in CHAT.prompt)
    same = replace(CHAT, prompt=turned, completions=("y",), row=7, scores=(1.0,))
    others = [replace(CHAT, tools=(TOOL,)), replace(CHAT, template_options={"thinking": False})]
    keys = prompt_keys_of([CHAT, same, *others])
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert len(set(split_keys_of([CHAT.prompt, turned]))) == 1
    told = (changed(SYSTEM, content="Tell a story."),)
    assert len(set(split_keys_of([(SYSTEM,), told]))) == 2


def test_these_keys_never_change():
    """Else prompts would cross the split from one version to another."""
    assert [key.hex() for key in prompt_keys_of([CHAT, TEXT]).tolist()] == [
        "5b1e64fe0e211ea8f0dad9dc73a24613",
        "4f743367ee26abbbe649c9f469217e84",
    ]
    assert [Prompt(one.prompt).key for one in (CHAT, TEXT)] == [
        key.hex() for key in prompt_keys_of([CHAT, TEXT]).tolist()
    ]
    split = split_keys_of([CHAT.prompt, TEXT.prompt]).tolist()
    assert [f"{key:016x}" for key in split] == ["95af2ee0f0ebd776", "0b10a4cb61633113"]
