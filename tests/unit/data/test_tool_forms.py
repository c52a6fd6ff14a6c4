"""What templates make of calls of tools and of plain text."""

import json

import pytest

from align.schemas.data_options import TokenOptions
from align.schemas.errors import UsageError
from align.stages.data.cells import UNWRAPPED, Wrapping
from align.stages.data.encode import encode_prompt
from align.stages.data.row_keys import prompt_keys_of
from align.stages.data.tokenizer import load_tokenizer
from support import tool_templates
from support.byte_tokenizers import FAMILIES, byte_tokenizer
from support.read_rows import (
    USER,
    bot,
    conversation,
    encode_one,
    record_of,
    refusal_of,
    rejection_of,
    texts_of,
    user,
)
from support.tool_templates import WITHOUT_TOOLS, chat_tokenizer

ARGUMENTS = {"city": "Łódź", "days": [1, None], "exact": True}
AS_JSON = '{"city": "Łódź", "days": [1, null], "exact": true}'
PYTHON = "{'city': 'Łódź', 'days': [1, None], 'exact': True}"
WRITTEN = {  # what a call becomes
    "QWEN_2_5": f'{{"name": "weather", "arguments": {AS_JSON}}}',
    "QWEN_3": f'{{"name": "weather", "arguments": {AS_JSON}}}',
    "HERMES": f'{{"arguments": {AS_JSON}, "name": "weather"}}',
    "MISTRAL": f'[{{"name": "weather", "arguments": {AS_JSON}, "id": "call00001"}}]',
    "DEEPSEEK_R1": f"call>weather\n{AS_JSON}</call>",
    "CARELESS": f'{{"name": "weather", "arguments": {AS_JSON}}}',
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: chat_tokenizer(tmp_path_factory.mktemp("tok"), getattr(tool_templates, name))
        for name in (*WRITTEN, "WITHOUT_TOOLS")
    }


def call(arguments):
    function = {"name": "weather", "arguments": arguments}
    return ({"role": "assistant", "tool_calls": [{"id": "call00001", "function": function}]},)


RAIN = (bot("Rain."),)
FOUND = {"role": "tool", "content": "rain"}


@pytest.mark.parametrize("family", WRITTEN)
def test_arguments_may_be_an_object_or_text(folders, family):
    for given in (ARGUMENTS, AS_JSON):
        (_, said), _ = texts_of(folders[family], conversation(call(given)))
        answered = conversation(RAIN, prompt=(USER, *call(given), FOUND))
        (asked, _), _ = texts_of(folders[family], answered)
        for text in (said, asked):
            assert WRITTEN[family] in text
            assert "\\" not in text
            assert PYTHON not in text


def test_one_conversation_is_one_prompt_in_either_form(folders):
    prompts = [(USER, *call(given), FOUND) for given in (ARGUMENTS, AS_JSON)]
    both = [conversation(RAIN, prompt=prompt) for prompt in prompts]
    rows = [encode_one(folders["HERMES"], record)[0] for record in both]
    first, second = prompt_keys_of([row.text_row for row in rows])
    assert first == second
    tokenizer = load_tokenizer(folders["HERMES"], TokenOptions())
    assert [encode_prompt(record, tokenizer) for record in both] == [row.prompt for row in rows]


def test_a_call_may_lack_the_text_of_its_arguments_or_function(folders):
    for given in ("", " \n", "{}"):
        (_, completion), _ = texts_of(folders["HERMES"], conversation(call(given)))
        assert '{"arguments": {}, "name": "weather"}' in completion
    flat = ({"role": "assistant", "tool_calls": [{"name": "weather", "arguments": AS_JSON}]},)
    (_, completion), _ = texts_of(folders["HERMES"], conversation(flat))
    assert f'{{"arguments": {AS_JSON}, "name": "weather"}}' in completion


def test_text_that_is_no_object_is_refused_where_the_template_wants_one(folders):
    for given in ("{city: Łódź}", '{"city": ', "[1]", "3", json.dumps(AS_JSON), "[" * 100_000):
        bad = refusal_of(folders["QWEN_2_5"], conversation(call(given)))
        assert (bad.reason, "arguments of weather" in bad.detail) == ("schema", True)
    # A template that takes text too writes it as it stands.
    for given in ("{city: Łódź}", '{"city":"Łódź"}'):
        assert given in texts_of(folders["QWEN_3"], conversation(call(given)))[0][1]


@pytest.mark.parametrize("is_within", [True, False])
def test_parameters_of_tools_given_as_text_are_written_once(folders, is_within):
    def tool(parameters):
        plain = {"name": "weather", "parameters": parameters}
        return {"type": "function", "function": plain} if is_within else plain

    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = (tool(json.dumps(parameters)), {"name": "bare"})
    for family in ("HERMES", "CARELESS"):  # which takes arguments as text, and tools as objects
        (prompt, _), _ = texts_of(folders[family], conversation(call(ARGUMENTS), tools=tools))
        assert f'<tools>{json.dumps(tool(parameters))}{{"name": "bare"}}</tools>' in prompt


def test_a_completion_of_calls_that_no_template_writes_is_refused(folders):
    bad = refusal_of(folders["WITHOUT_TOOLS"], conversation(call(ARGUMENTS)))
    assert bad.reason == "template_error"
    spoken = (bot("Let me look.") | call(ARGUMENTS)[0],)
    (_, completion), _ = texts_of(folders["WITHOUT_TOOLS"], conversation(spoken))
    assert completion == "Let me look.<|im_end|>"


SHOWN = "<think>{{ m.reasoning_content or '' }}</think>{{ m.content }}"
LAST_SHOWN = SHOWN.replace("or ''", "if loop.last else ''")


@pytest.mark.parametrize(
    ("written", "lost"), [("{{ m.content }}", 1), (SHOWN, 0), (LAST_SHOWN, 0)], ids=str
)
def test_reasoning_that_a_template_never_shows_is_counted(tmp_path, written, lost):
    folder = chat_tokenizer(tmp_path, WITHOUT_TOOLS.replace("{{ m.content }}", written))
    thought = bot("Rain.") | {"reasoning_content": "Clouds are grey."}
    note = "rows_with_reasoning_that_the_template_never_shows"
    for record in (
        conversation((thought,)),
        conversation(RAIN, prompt=(USER, thought, USER)),
    ):
        assert encode_one(folder, record)[1][note] == lost
    assert not encode_one(folder, conversation(RAIN))[1][note]


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


def test_a_plain_prompt_becomes_a_users_message():
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


def test_columns_of_conversations_need_text_that_is_wrapped():
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
        ("chosen", "This.\n\nHuman: Why?\n\nAssistant: So."),
        ("rejected", "Assistant: That."),
        ("system", "User: Which?"),
    ):
        bad = refused(PAIR | {column: text})
        assert (bad.reason, repr(column) in bad.detail) == ("schema", True), text
        assert "data.wrap=none" in bad.detail
        assert column == "system" or record_of(PAIR | {column: text})


def test_text_that_only_mentions_such_marks_is_wrapped():
    for prompt in ("What is a human: a study", "Is [1] < 2 or > 3?", "Q: Who?\nA:"):
        assert wrapped(PAIR | {"prompt": prompt}).prompt == (user(prompt),)


def test_wrapped_text_needs_a_column_of_prompts():
    row = {"chosen": "Which? It is this.", "rejected": "Which? It is that."}
    assert "--map prompt=" in refused(row).detail
    assert record_of(row).prompt == "Which? It is"
    chat = {name: [user("Which?"), bot(name)] for name in row}
    assert wrapped(chat) == record_of(chat)


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tok"), **FAMILIES["qwen base"])


def wrapping(folder):
    return load_tokenizer(folder, TokenOptions()).wrapping("chat")


def test_text_with_what_the_template_writes_is_not_rendered_twice(qwen_folder, tmp_path):
    row = PAIR | {"system": "Be kind."}
    for name in row:
        bad = refused(row | {name: f"{row[name]}<|im_end|>"}, wrapping(qwen_folder))
        assert (bad.reason, "<|im_end|>" in bad.detail) == ("schema", True)
        assert repr(name) in bad.detail
        assert wrapped(row | {name: f"{row[name]}<|im_ends|>"}, wrapping(qwen_folder))
    # A special token that the template does not write is text.
    folder = byte_tokenizer(tmp_path, ["<s>", "</s>", "<unk>"], template=LLAMA_2, eos="</s>")
    assert refused(PAIR | {"prompt": "a </s>"}, wrapping(folder))
    assert wrapped(PAIR | {"prompt": "<unk> is [INST]"}, wrapping(folder))


def test_wrapping_needs_a_template(tmp_path):
    folder = byte_tokenizer(tmp_path, ["</s>"], template=None, eos="</s>")
    with pytest.raises(UsageError, match=r"(?s)data\.wrap.*tokens\.chat_template"):
        wrapping(folder)
    assert load_tokenizer(folder, TokenOptions()).wrapping("auto") == UNWRAPPED
