"""Plain text as messages of a user and an assistant, and text that is rendered already."""

import json

import pytest

from align.schemas.config import TokenOptions
from align.schemas.errors import UsageError
from align.stages.data.chat_wrap import Wrapping
from align.stages.data.data_schema import detect_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.encode import Encoder
from align.stages.data.file_formats import JsonRows
from align.stages.data.input_files import Chunk
from align.stages.data.tokenizer import load_tokenizer
from support.byte_tokenizers import FAMILIES, byte_tokenizer

CHAT = Wrapping(True)
PAIR = {"prompt": "Which?", "chosen": " This.", "rejected": "\n\nThat."}
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'system' %}[INST] <<SYS>>\n{{ m.content }}\n<</SYS>>"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} </s>"
    "{% endif %}{% endfor %}"
)


def parse(row, wrap=CHAT):
    shape = detect_shape(list(row), {}, where="test")
    vars(shape)["wrap"] = wrap
    return parse_chunk(Chunk(0, 0, JsonRows([json.dumps(row).encode()])), shape)


def record_of(row, wrap=CHAT):
    (record,), rejected = parse(row, wrap)
    assert not rejected
    return record


def rejection_of(row, wrap=CHAT):
    records, (bad,) = parse(row, wrap)
    assert not records
    return bad


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def test_a_plain_prompt_is_a_users_message_and_white_space_where_the_answer_begins_is_gone():
    record = record_of(PAIR | {"prompt": " Which? \n"})
    assert record.prompt == (user(" Which?"),)
    assert record.completions == ((bot("This."),), (bot("That."),))
    kept = record_of(PAIR | {"chosen": [bot(" This.")]})
    assert kept.completions == ((bot(" This."),), (bot("That."),))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "completion": " c\n", "label": True},
        {"prompt": "p", "completions": [" c\n"], "scores": [1]},
        {"prompt": "p", "completion": " c\n", "score": 3},
    ],
)
def test_every_kind_of_rows_is_wrapped(row):
    assert record_of(row).prompt == (user("p"),)
    assert record_of(row).completions == ((bot("c\n"),),)
    assert record_of(row, Wrapping()).completions == (" c\n",)


def test_conversations_are_what_they_are_without_it():
    row = {"prompt": [user("p "), bot("Sure,")], "chosen": " c", "rejected": [bot(" r")]}
    assert record_of(row) == record_of(row, Wrapping())


def test_the_columns_of_conversations_go_with_text_that_is_one():
    row = PAIR | {"system": "Be kind.", "tools": [{"name": "f"}]}
    record = record_of(row | {"chat_template_kwargs": {"thinking": False}})
    assert record.prompt == ({"role": "system", "content": "Be kind."}, user("Which?"))
    assert (record.tools, record.template_options) == (({"name": "f"},), {"thinking": False})


@pytest.mark.parametrize("column", ["system", "tools", "chat_template_kwargs"])
def test_such_a_column_beside_text_is_refused_with_the_ways_on(column):
    value = {"system": "s", "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}}[column]
    bad = rejection_of(PAIR | {column: value}, Wrapping())
    assert "data.wrap=chat" in bad.detail
    assert f"--map {column}=" in bad.detail


@pytest.mark.parametrize(
    ("cells", "column"),
    [
        ({"prompt": "Human: Which?\n\nAssistant:"}, "prompt"),
        ({"prompt": "\n\nHuman: Which?"}, "prompt"),
        ({"prompt": "User: Which?"}, "prompt"),
        ({"prompt": "USER : Which? ASSISTANT:"}, "prompt"),
        ({"prompt": "### Human: Which?"}, "prompt"),
        ({"prompt": "Be kind.\n\n### Instruction:\nWhich?\n\n### Response:\n"}, "prompt"),
        ({"prompt": "Which?\n\nAssistant:"}, "prompt"),
        ({"chosen": "This.\n\nHuman: Why?\n\nAssistant: So."}, "chosen"),
        ({"rejected": "Assistant: That."}, "rejected"),
        ({"system": "User: Which?"}, "system"),
    ],
)
def test_a_transcript_is_not_rendered_twice(cells, column):
    bad = rejection_of(PAIR | cells)
    assert (bad.reason, repr(column) in bad.detail) == ("already_rendered", True)
    assert "data.wrap=none" in bad.detail
    if "system" not in cells:
        assert record_of(PAIR | cells, Wrapping())


@pytest.mark.parametrize(
    "prompt",
    ["What is a human: a study", "Ask the user: why?", "Is [1] < 2 or > 3?", "Q: Who?\nA:"],
)
def test_text_that_only_speaks_of_such_things_is_wrapped(prompt):
    assert record_of(PAIR | {"prompt": prompt}).prompt == (user(prompt),)


def test_text_whose_prompt_has_no_column_is_refused_because_answers_may_begin_alike():
    row = {"chosen": "Which? It is this.", "rejected": "Which? It is that."}
    assert "--map prompt=" in rejection_of(row).detail
    assert record_of(row, Wrapping()).prompt == "Which? It is"
    transcript = {name: f"\n\nHuman: Which?\n\nAssistant: {name}" for name in row}
    assert rejection_of(transcript).reason == "already_rendered"
    chat = {name: [user("Which?"), bot(name)] for name in row}
    assert record_of(chat) == record_of(chat, Wrapping())


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tok"), **FAMILIES["qwen base"])


def wrapping(folder):
    return load_tokenizer(folder, TokenOptions()).wrapping("chat", folder)


def test_text_is_rendered_as_the_same_conversation_is(qwen_folder):
    rules = TokenOptions()
    tokenizer = load_tokenizer(qwen_folder, rules)
    text = record_of(PAIR, tokenizer.wrapping("chat", qwen_folder))
    chat = record_of(
        {"prompt": [user("Which?")], "chosen": "This.", "rejected": "That."}, Wrapping()
    )
    first, second = Encoder(tokenizer, rules).encode([text, chat]).rows
    assert (first.prompt, first.completions) == (second.prompt, second.completions)
    decoded = tokenizer.hf.decode([*first.prompt, *first.completions[0]])
    assert decoded == "<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\nThis.<|im_end|>"


@pytest.mark.parametrize("name", ["prompt", "chosen", "rejected", "system"])
def test_text_with_what_the_template_writes_is_not_rendered_twice(qwen_folder, name):
    row = PAIR | {"system": "Be kind."}
    bad = rejection_of(row | {name: f"{row[name]}<|im_end|>"}, wrapping(qwen_folder))
    assert (bad.reason, "<|im_end|>" in bad.detail) == ("already_rendered", True)
    assert repr(name) in bad.detail
    assert record_of(row | {name: f"{row[name]}<|im_ends|>"}, wrapping(qwen_folder))


@pytest.mark.parametrize(
    ("template", "marks"),
    [(ZEPHYR, ["<|user|>", "</s>"]), (LLAMA_2, ["[INST]", "[/INST]", "<<SYS>>"])],
)
def test_what_a_template_writes_need_not_be_a_special_token(tmp_path, template, marks):
    folder = byte_tokenizer(tmp_path, ["<s>", "</s>"], template=template, eos="</s>")
    for mark in marks:
        assert rejection_of(PAIR | {"prompt": f"{mark} a"}, wrapping(folder))
    assert record_of(PAIR | {"prompt": "<b>a</b> [A] <think>b</think>"}, wrapping(folder))


def test_wrapping_needs_a_template(tmp_path):
    folder = byte_tokenizer(tmp_path, ["</s>"], template=None, eos="</s>")
    with pytest.raises(UsageError, match=r"data\.wrap is chat and .* no chat template"):
        wrapping(folder)
    assert load_tokenizer(folder, TokenOptions()).wrapping("auto", folder) == Wrapping()
