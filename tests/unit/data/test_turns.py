"""Chat templates as transformers renders them, and which tokens of a conversation are learned."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from align.schemas.data_options import TokenOptions
from align.schemas.errors import UsageError
from align.schemas.rows import BadRow
from align.stages.data.row_keys import key_rows
from align.stages.data.tokenizer import load_tokenizer
from support import tool_templates
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, byte_tokenizer
from support.read_rows import (
    USER,
    bot,
    conversation,
    encode,
    encode_one,
    record_of,
    refusal_of,
    rejection_of,
    user,
)
from support.turn_templates import KINDS, SEVERAL, WITH_A_TOOL

ONE, TWO = bot("A one"), bot("A two")
LOOK = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}]}
FOUND = {"role": "tool", "content": "found"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), **kind)
        for name, kind in KINDS.items()
    }


def turns_of(folder, record, **options):
    """The texts of the learned tokens of a completion, one for each run of them."""
    row, _ = encode_one(folder, record, **options)
    (ids,), (turns,) = row.completions, row.learned
    decode = load_tokenizer(folder, TokenOptions()).hf.decode
    edges = np.flatnonzero(np.diff(turns, prepend=0, append=0))
    runs = [slice(start, stop) for start, stop in pairwise(edges.tolist())]
    return tuple(decode(ids[run]) for run in runs if turns[run.start] > 0)


@pytest.mark.parametrize("kind", SEVERAL)
def test_each_assistant_turn_is_learned_with_its_stop(folders, kind):
    record = conversation((ONE, user("and?"), TWO))
    assert turns_of(folders[kind], record) == SEVERAL[kind]
    assert turns_of(folders[kind], record, learn="last") == SEVERAL[kind][1:]


@pytest.mark.parametrize("kind", WITH_A_TOOL)
def test_what_a_tool_returns_is_not_learned_and_the_call_of_it_is(folders, kind):
    assert turns_of(folders[kind], conversation((LOOK, FOUND, TWO))) == WITH_A_TOOL[kind]
    begun = conversation((FOUND, TWO), prompt=(USER, LOOK))
    assert turns_of(folders[kind], begun) == WITH_A_TOOL[kind][1:]


@pytest.mark.parametrize("kind", SEVERAL)
def test_one_turn_or_everything_is_learned_as_a_whole(folders, kind):
    row, _ = encode_one(folders[kind], conversation((ONE,), (TWO,)))
    assert row.learned == (None, None)
    several = conversation((ONE, user("and?"), TWO))
    everything, _ = encode_one(folders[kind], several, learn="all")
    of_turns, _ = encode_one(folders[kind], several)
    assert everything.learned == (None,)
    assert everything.completions == of_turns.completions
    assert key_rows([everything], carried=()).learned is None


def test_dropped_thoughts_need_marked_turns(folders):
    record = conversation((bot("<think>Hm.</think>A one"), user("and?"), TWO))
    bad = refusal_of(folders["drops thoughts"], record)
    assert (bad.reason, "tokens.learn" in bad.detail) == ("template_error", True)
    assert turns_of(folders["marked"], record) == SEVERAL["marked"]
    kept = conversation((ONE, user("and?"), bot("<think>Hm.</think>A two")))
    thought = ("A one<|im_end|>", "<think>Hm.</think>A two<|im_end|>")
    assert turns_of(folders["drops thoughts"], kept) == turns_of(folders["marked"], kept) == thought


MARKS = [{"loss": False}, {"loss": 0}, {"loss": 0.0}, {"weight": 0}, {"weight": 0, "loss": False}]


@pytest.mark.parametrize("mark", MARKS, ids=str)
def test_a_message_that_says_so_is_not_learned(folders, mark):
    row = {"prompt": [USER | {"loss": True}], "label": True}
    row["completion"] = [
        ONE | mark,
        user("and?") | {"weight": None},
        TWO | {"loss": 1, "weight": 1.0},
    ]
    record = record_of(row)
    assert turns_of(folders["qwen base"], record) == ("A two<|im_end|>",)
    # Neither the template nor what identifies a prompt sees the marks.
    plain = record_of(row | {"prompt": [USER], "completion": [ONE, user("and?"), TWO]})
    assert replace(record, learned=()) == plain
    alone = record_of(row | {"completion": [ONE | mark]})
    assert refusal_of(folders["qwen base"], alone).reason == "nothing_learned"
    last = record_of(row | {"completion": [TWO, USER, ONE | mark]})
    assert refusal_of(folders["qwen base"], last, learn="last").reason == "nothing_learned"


@pytest.mark.parametrize(
    "mark", [{"weight": 0.5}, {"loss": "no"}, {"loss": True, "weight": 0}], ids=str
)
def test_a_mark_that_says_something_else_is_refused(mark):
    bad = rejection_of({"prompt": [USER], "completion": [ONE | mark], "label": True})
    assert (bad.reason, next(iter(mark)) in bad.detail) == ("schema", True)


def test_a_marked_beginning_of_both_answers_is_their_prompt():
    pair = {"chosen": [USER, ONE | {"loss": False}, USER, TWO], "rejected": [USER, ONE, USER, ONE]}
    assert record_of(pair).prompt == (USER, ONE, USER)


def test_a_completion_without_an_own_turn_has_nothing_to_learn(folders):
    folder = folders["qwen base"]
    assert (
        refusal_of(folder, conversation((FOUND,), prompt=(USER, LOOK))).reason == "nothing_learned"
    )
    late = conversation((FOUND, TWO), prompt=(USER, LOOK))
    prompt = len(encode_one(folder, late)[0].prompt)
    bad = refusal_of(folder, late, max_length=prompt + 10)
    assert (bad.reason, "max_length" in bad.detail) == ("nothing_learned", True)


def test_a_continued_message_is_learned_from_there(folders):
    record = conversation((bot(" one"), user("and?"), TWO), prompt=(USER, bot("A")))
    assert turns_of(folders["qwen base"], record) == (" one<|im_end|>", "A two<|im_end|>")
    assert turns_of(folders["marked"], record) == (" one<|im_end|>", "A two<|im_end|>")


TEMPLATES = {name: kind["template"] for name, kind in KINDS.items()} | {
    name: text
    for name, text in vars(tool_templates).items()
    if name.isupper() and isinstance(text, str)
}
CALL = {"name": "look", "arguments": {"a": 1, "b": "é", "c": [None, True, 0.5]}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CONVERSATIONS = (
    [user("hi")],
    [user(" Żółw\n"), bot("好 {{ 1 }} \ud800")],
    [{"role": "system", "content": "Be kind."}, user("hi"), bot("one"), user("and?"), bot("two ")],
    [user("hi"), {"role": "assistant", "tool_calls": [{"id": "call00001", "function": CALL}]}],
    [user("hi"), {**bot("A"), "thinking": "Hm.", "content": "A"}, {"role": "tool", "content": "x"}],
    [user("hi"), {**bot("A"), "reasoning": "Hm.", "n": 2**70, "raw": b"bytes"}, user("")],
)
NOT_JINJA = {
    "an open loop": ("first\n{% for m in messages %}\n{{ m.content }}", 3),
    "an unknown tag": ("first\n\n{% nothing %}", 3),
    "an unknown filter": ("first\n{{ messages | nothing }}", 2),
    "an open bracket": ("{{ messages[ }}", 1),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def make(template):
        folder = tmp_path_factory.mktemp("tokenizer")
        return byte_tokenizer(folder, CHATML_SPECIALS, template=template, eos="<|endoftext|>")

    return make


def text_or_none(render, *given, **named):
    """A text, or nothing where that is an error."""
    try:
        return render(*given, **named)
    except Exception:  # whatever a template raises
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_is_that_of_transformers(folder_of, name):
    tokenizer = load_tokenizer(folder_of(TEMPLATES[name]), TokenOptions())
    hows = [{}, {"add_generation_prompt": True}, {"continue_final_message": True}]
    texts = 0
    for messages, tools, how in product(CONVERSATIONS, (None, TOOLS), hows):
        found = text_or_none(tokenizer.chat.render, messages, tools, {"extra": [1]}, **how)
        expected = text_or_none(
            tokenizer.hf.apply_chat_template,
            *(messages, tools),
            tokenize=False,
            extra=[1],
            **how,
        )
        assert (found.text if found else None) == expected, (messages, how)
        texts += expected is not None
    assert texts


def test_marks_of_a_template_are_those_of_transformers(folder_of):
    tokenizer = load_tokenizer(folder_of(TEMPLATES["marked"]), TokenOptions())
    messages = [user("hi"), bot("one"), user("and?"), bot("two ")]
    text, spans = tokenizer.chat.render(messages)
    assert [text[slice(*span)] for span in spans] == ["one<|im_end|>", "two <|im_end|>"]
    expected = tokenizer.hf.apply_chat_template(messages, return_assistant_tokens_mask=True)
    starts = [start for start, _ in tokenizer.backend.encode(text).offsets]
    learned = [any(start <= at < stop for start, stop in spans) for at in starts]
    assert [*map(bool, expected["assistant_masks"])] == learned


@pytest.mark.parametrize("name", NOT_JINJA)
def test_a_template_that_is_not_jinja_is_refused(folder_of, tmp_path, name):
    template, line = NOT_JINJA[name]
    folder = folder_of(template)
    mine = tmp_path / "mine.jinja"
    mine.write_text(template)
    for options, file in (({}, folder), ({"chat_template": str(mine)}, str(mine))):
        tokenizer = load_tokenizer(folder, TokenOptions(**options))
        for use in (
            tokenizer.require_template,
            lambda options=options: encode(folder, conversation((bot("one"),)), **options),
        ):
            with pytest.raises(
                UsageError, match=rf"(?s){file}.*line {line}\b.*tokens.chat_template"
            ):
                use()
    # Plain text has no use for it.
    plain = replace(conversation("one", "two"), prompt="hi")
    assert encode(folder, plain) == encode(folder_of(None), plain)


def test_a_template_error_rejects_its_own_row_only(folder_of):
    raising = "{% if 'go off' in m.content %}{{ raise_exception('off it goes') }}{% endif %}"
    folder = folder_of(CHATML.replace("{{ m.content }}", "{{ m.content }}" + raising))
    rows = [conversation((bot(f"one {n}"), user("and?"), bot("two"))) for n in range(40)]
    rows = [replace(row, row=n) for n, row in enumerate(rows)]
    hit = {7, 33}
    mixed = [replace(row, prompt=(user("go off!"),)) if row.row in hit else row for row in rows]
    found, rejected, _ = encode(folder, *mixed)
    assert [(one.row, one.reason) for one in rejected] == [
        (n, "template_error") for n in sorted(hit)
    ]
    assert all("off it goes" in one.detail for one in rejected)
    well, others, _ = encode(folder_of(CHATML), *[row for row in rows if row.row not in hit])
    assert [*map(repr, found)] == [*map(repr, well)]
    assert not others


def test_options_of_a_row_cannot_stand_for_its_messages(folder_of):
    chat = load_tokenizer(folder_of(CHATML), TokenOptions()).chat
    for name in ("messages", "tokenize", "add_generation_prompt"):
        with pytest.raises(BadRow, match=name):
            chat.render([user("hi")], None, {name: True})
