"""Plain text as messages of a user and an assistant, and text that is rendered already."""

import pytest

from align.schemas.config import TokenOptions
from align.schemas.errors import UsageError
from align.stages.data.chat_wrap import UNWRAPPED, Wrapping
from align.stages.data.tokenizer import load_tokenizer
from support.byte_tokenizers import FAMILIES, byte_tokenizer
from support.read_rows import bot, record_of, rejection_of, user

CHAT = Wrapping(True)
PAIR = {"prompt": "Which?", "chosen": " This.", "rejected": "\n\nThat."}
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'system' %}[INST] <<SYS>>\n{{ m.content }}\n<</SYS>>"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} </s>"
    "{% endif %}{% endfor %}"
)


def wrapped(row, wrap=CHAT):
    return record_of(row, wrap=wrap)


def refused(row, wrap=CHAT):
    return rejection_of(row, wrap=wrap)


def test_a_plain_prompt_is_a_users_message_and_white_space_where_the_answer_begins_is_gone():
    record = wrapped(PAIR | {"prompt": " Which? \n"})
    assert record.prompt == (user(" Which?"),)
    assert record.completions == ((bot("This."),), (bot("That."),))
    kept = wrapped(PAIR | {"chosen": [bot(" This.")]})
    assert kept.completions == ((bot(" This."),), (bot("That."),))
    for other in (
        {"prompt": "p", "completion": " c\n", "label": True},
        {"prompt": "p", "completions": [" c\n"], "scores": [1]},
        {"prompt": "p", "completion": " c\n", "score": 3},
    ):
        record = wrapped(other)
        assert (record.prompt, record.completions) == ((user("p"),), ((bot("c\n"),),))
        assert record_of(other).completions == (" c\n",)
    chat = {"prompt": [user("p "), bot("Sure,")], "chosen": " c", "rejected": [bot(" r")]}
    assert wrapped(chat) == record_of(chat)


def test_the_columns_of_conversations_go_with_text_that_is_one_and_are_refused_beside_other_text():
    columns = {"system": "Be kind.", "tools": [{"name": "f"}]}
    columns["chat_template_kwargs"] = {"thinking": False}
    record = wrapped(PAIR | columns)
    assert record.prompt == ({"role": "system", "content": "Be kind."}, user("Which?"))
    assert (record.tools, record.template_options) == (({"name": "f"},), {"thinking": False})
    for column, value in columns.items():
        bad = rejection_of(PAIR | {column: value})
        assert "data.wrap=chat" in bad.detail
        assert f"--map {column}=" in bad.detail


def test_a_transcript_is_not_rendered_twice():
    for column, text in (
        ("prompt", "Human: Which?\n\nAssistant:"),
        ("prompt", "User: Which?"),
        ("prompt", "USER : Which? ASSISTANT:"),
        ("prompt", "Be kind.\n\n### Instruction:\nWhich?\n\n### Response:\n"),
        ("chosen", "This.\n\nHuman: Why?\n\nAssistant: So."),
        ("rejected", "Assistant: That."),
        ("system", "User: Which?"),
    ):
        bad = refused(PAIR | {column: text})
        assert (bad.reason, repr(column) in bad.detail) == ("already_rendered", True), text
        assert "data.wrap=none" in bad.detail
        assert column == "system" or record_of(PAIR | {column: text})


def test_text_that_only_speaks_of_such_things_is_wrapped():
    for prompt in ("What is a human: a study", "Is [1] < 2 or > 3?", "Q: Who?\nA:"):
        assert wrapped(PAIR | {"prompt": prompt}).prompt == (user(prompt),)


def test_text_whose_prompt_has_no_column_is_refused_because_answers_may_begin_alike():
    row = {"chosen": "Which? It is this.", "rejected": "Which? It is that."}
    assert "--map prompt=" in refused(row).detail
    assert record_of(row).prompt == "Which? It is"
    transcript = {name: f"\n\nHuman: Which?\n\nAssistant: {name}" for name in row}
    assert refused(transcript).reason == "already_rendered"
    chat = {name: [user("Which?"), bot(name)] for name in row}
    assert wrapped(chat) == record_of(chat)


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tok"), **FAMILIES["qwen base"])


def wrapping(folder):
    return load_tokenizer(folder, TokenOptions()).wrapping("chat", folder)


def test_text_with_what_the_template_writes_is_not_rendered_twice(qwen_folder, tmp_path):
    row = PAIR | {"system": "Be kind."}
    for name in row:
        bad = refused(row | {name: f"{row[name]}<|im_end|>"}, wrapping(qwen_folder))
        assert (bad.reason, "<|im_end|>" in bad.detail) == ("already_rendered", True)
        assert repr(name) in bad.detail
        assert wrapped(row | {name: f"{row[name]}<|im_ends|>"}, wrapping(qwen_folder))
    # Which need not be a special token.
    folder = byte_tokenizer(tmp_path, ["<s>", "</s>"], template=LLAMA_2, eos="</s>")
    for mark in ("[INST]", "[/INST]", "<<SYS>>"):
        assert refused(PAIR | {"prompt": f"{mark} a"}, wrapping(folder))
    assert wrapped(PAIR | {"prompt": "<b>a</b> [A] <think>b</think>"}, wrapping(folder))


def test_wrapping_needs_a_template(tmp_path):
    folder = byte_tokenizer(tmp_path, ["</s>"], template=None, eos="</s>")
    with pytest.raises(UsageError, match=r"data\.wrap is chat and .* no chat template"):
        wrapping(folder)
    assert load_tokenizer(folder, TokenOptions()).wrapping("auto", folder) == UNWRAPPED
