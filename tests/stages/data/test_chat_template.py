"""Chat templates: the text of transformers, and refusals of what cannot be rendered."""

from dataclasses import replace
from itertools import product

import pytest

from align.schemas.data_options import TokenOptions
from align.schemas.errors import UsageError
from align.schemas.rows import BadRow
from align.stages.data.tokenizer import load_tokenizer
from support import tool_templates
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, byte_tokenizer
from support.read_rows import bot, conversation, encode, user
from support.turn_templates import KINDS

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
