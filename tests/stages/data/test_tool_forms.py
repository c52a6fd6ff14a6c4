"""What templates make of calls of tools and of plain text, and what they leave out of a row."""

import json

import pytest

from align.schemas.data_options import TokenOptions
from align.schemas.errors import UsageError
from align.schemas.row_keys import prompt_keys_of
from align.stages.data.chat_wrap import UNWRAPPED, Wrapping
from align.stages.data.encode import encode_prompt
from align.stages.data.template_probe import Shown
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
from support.tool_templates import QWEN_2_5, WITHOUT_TOOLS, chat_tokenizer

ARGUMENTS = {"city": "Łódź", "days": [1, None], "exact": True}
AS_JSON = '{"city": "Łódź", "days": [1, null], "exact": true}'
PYTHON = "{'city': 'Łódź', 'days': [1, None], 'exact': True}"
# What a call becomes, and in which forms the template writes its arguments as they are meant.
WRITTEN = {
    "QWEN_2_5": (f'{{"name": "weather", "arguments": {AS_JSON}}}', Shown(as_object=True)),
    "QWEN_3": (f'{{"name": "weather", "arguments": {AS_JSON}}}', Shown(True, True)),
    "HERMES": (f'{{"arguments": {AS_JSON}, "name": "weather"}}', Shown(as_object=True)),
    "MISTRAL": (
        f'[{{"name": "weather", "arguments": {AS_JSON}, "id": "call00001"}}]',
        Shown(as_object=True),
    ),
    "DEEPSEEK_R1": (f"call>weather\n{AS_JSON}</call>", Shown(as_text=True)),
    "CARELESS": (f'{{"name": "weather", "arguments": {AS_JSON}}}', Shown(as_text=True)),
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
def test_arguments_are_written_once_whether_they_are_given_as_an_object_or_as_text(folders, family):
    expected, forms = WRITTEN[family]
    noted = "rows_with_calls_of_tools_converted_for_the_template"
    for given, is_taken in ((ARGUMENTS, forms.as_object), (AS_JSON, forms.as_text)):
        (_, said), notes = texts_of(folders[family], conversation(call(given)))
        answered = conversation(RAIN, prompt=(USER, *call(given), FOUND))
        (asked, _), notes_of_prompt = texts_of(folders[family], answered)
        assert notes[noted] == notes_of_prompt[noted] == (not is_taken)
        assert expected in said
        assert expected in asked
        assert "\\" not in said
        assert PYTHON not in said
    assert forms_of(folders[family]) == forms


def forms_of(folder):
    """How a template says that it takes arguments when it is asked."""
    tokenizer = load_tokenizer(folder, TokenOptions())
    return tokenizer.tool_forms.arguments


def test_one_conversation_is_one_prompt_in_either_form(folders):
    prompts = [(USER, *call(given), FOUND) for given in (ARGUMENTS, AS_JSON)]
    both = [conversation(RAIN, prompt=prompt) for prompt in prompts]
    rows = [encode_one(folders["HERMES"], record)[0] for record in both]
    first, second = prompt_keys_of([row.record for row in rows]).prompt
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
    assert texts_of(folders["QWEN_3"], conversation(call("{city: Łódź}")))  # as it stands


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
    assert forms_of(folders["WITHOUT_TOOLS"]) == Shown()
    bad = refusal_of(folders["WITHOUT_TOOLS"], conversation(call(ARGUMENTS)))
    assert (bad.reason, "calls" in bad.detail) == ("template_error", True)
    spoken = (bot("Let me look.") | call(ARGUMENTS)[0],)
    (_, completion), _ = texts_of(folders["WITHOUT_TOOLS"], conversation(spoken))
    assert completion == "Let me look.<|im_end|>"


THINKING = WITHOUT_TOOLS.replace(
    "{{ m.content }}", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content | trim }}",
)  # fmt: skip
LAST_THOUGHTS = THINKING.replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}")
CUTS_THOUGHTS = WITHOUT_TOOLS.replace("m.content", "m.content.split('</think>')[-1]")
SPACED = WITHOUT_TOOLS.replace("m.content", "m.content.replace('</think>', '\n</think>\n\n')")
DUMPED = WITHOUT_TOOLS.replace("m.content", "m.content | tojson")
SAID = bot("a")
ANSWERED = {"role": "tool", "content": "found"}
THOUGHT = bot("Rain.\n") | {"reasoning_content": "Clouds\nare grey."}
EARLIER = bot("Sun.") | {"reasoning_content": "Birds."}
THINKS = bot("<think>Clouds.</think>Rain.")
LOOK = {"tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}]}
DESCRIBED = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
CALLING = bot("Let me see.") | LOOK
NOTED = SAID | {"editor's note": "this one is not quite right"}
KEYED = {"id": "7f3a", "created": "2024-01-01 10:00:00 UTC", "rank": 3}
NAMED = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "found"}
NOTHING = (set(), set())


@pytest.fixture
def notes(tmp_path):
    """What is noted of completions of a prompt under a template."""

    def count(template, *completions, prompt=(USER,), **more):
        folder = chat_tokenizer(tmp_path, template)
        found = encode_one(folder, conversation(*completions, prompt=prompt, **more))[1]
        return {name: count for name, count in found.items() if count}

    return count


def test_turns_of_users_and_tools_inside_completions_are_counted(notes):
    found = notes(WITHOUT_TOOLS, (SAID, USER, SAID), (SAID, ANSWERED, SAID, USER, SAID), (SAID,))
    assert found["rows_with_turns_of_others_in_completions"] == 1
    assert found["turns_of_others_in_completions_left_out"] == 3
    alone = notes(WITHOUT_TOOLS, (SAID,), prompt=(USER, SAID, ANSWERED, SAID, USER))
    assert alone == {"rows_of_conversations": 1}


@pytest.mark.parametrize(
    ("template", "before", "said", "in_prompt", "in_completion"),
    [
        (WITHOUT_TOOLS, (), THOUGHT, set(), {"reasoning_content"}),
        (THINKING, (THOUGHT, USER), THOUGHT, *NOTHING),
        (WITHOUT_TOOLS, (), bot("Rain.") | {"thinking": "Clouds."}, set(), {"thinking"}),
        (LAST_THOUGHTS, (EARLIER, USER), THOUGHT, {"reasoning_content"}, set()),
        (CUTS_THOUGHTS, (), THINKS, set(), {"content"}),
        (CUTS_THOUGHTS, (), bot("Rain."), *NOTHING),
        (SPACED, (), THINKS, *NOTHING),
        (DUMPED, (), bot('"Rain"\n'), *NOTHING),
        (WITHOUT_TOOLS, (USER | {"name": "Ann"},), SAID, {"name"}, set()),
        (WITHOUT_TOOLS, (SAID, NAMED), SAID | KEYED, *NOTHING),
        (WITHOUT_TOOLS, (), NOTED, set(), {"other keys"}),
        (WITHOUT_TOOLS, (CALLING, USER), CALLING, {"tools", "tool_calls"}, {"tool_calls"}),
        (QWEN_2_5, (CALLING, USER), CALLING, *NOTHING),
    ],
)
def test_what_a_template_leaves_out_of_the_text_of_a_row_is_noted_and_ids_are_not(
    notes, template, before, said, in_prompt, in_completion
):
    tools = DESCRIBED if said is CALLING else None
    found = notes(template, (said,), prompt=(USER, *before), tools=tools)
    lost = {
        f"rows_with_{part}_text_that_the_template_leaves_out_in_'{name}'"
        for part, names in (("prompt", in_prompt), ("completion", in_completion))
        for name in names
    }
    assert set(found) - {"rows_of_conversations"} == lost


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
