"""Arguments and parameters of tools, as objects and as JSON text, under templates of many kinds."""

import json
from dataclasses import replace

import pytest

from align.schemas.config import TokenOptions
from align.schemas.row_keys import prompt_keys_of
from align.schemas.rows import Record, Role
from align.stages.data.encode import Encoder, encode_prompt
from align.stages.data.template_probe import Shown, TemplateProbe
from align.stages.data.tokenizer import load_tokenizer
from align.stages.data.tool_forms import ToolForms
from support import tool_templates
from support.tool_templates import chat_tokenizer

ARGUMENTS = {"city": "Łódź", "days": [1, None], "exact": True}
AS_JSON = '{"city": "Łódź", "days": [1, null], "exact": true}'
PYTHON = "{'city': 'Łódź', 'days': [1, None], 'exact': True}"
# What a call becomes, and in which forms the template writes its arguments as they are meant.
WRITTEN = {
    "QWEN_2_5": (f'{{"name": "weather", "arguments": {AS_JSON}}}', Shown(as_object=True)),
    "QWEN_3": (f'{{"name": "weather", "arguments": {AS_JSON}}}', Shown(True, True)),
    "QWEN_3_CODER": (
        "<parameter=city>Łódź</parameter><parameter=days>[1, None]</parameter>"
        "<parameter=exact>True</parameter>",
        Shown(as_object=True),
    ),
    "HERMES": (f'{{"arguments": {AS_JSON}, "name": "weather"}}', Shown(as_object=True)),
    "LLAMA_3_1": (f'{{"name": "weather", "parameters": {AS_JSON}}}', Shown(as_object=True)),
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


def record(completion, prompt=(), **more):
    asked = ({"role": "user", "content": "hi"}, *prompt)
    return Record(0, 0, asked, (completion,), (Role.CANDIDATE,), (None,), **more)


def encode(folder, row):
    rules = TokenOptions()
    tokenizer = load_tokenizer(folder, rules)
    return Encoder(tokenizer, rules).encode([row]), tokenizer


def texts(folder, row):
    result, tokenizer = encode(folder, row)
    assert not result.rejected, result.rejected
    (found,) = result.rows
    return [tokenizer.hf.decode(ids) for ids in (found.prompt, *found.completions)], result.notes


def rejected(folder, row):
    (bad,) = encode(folder, row)[0].rejected
    return bad


@pytest.mark.parametrize("family", WRITTEN)
def test_arguments_are_written_once_whether_they_are_given_as_an_object_or_as_text(folders, family):
    expected, forms = WRITTEN[family]
    noted = "rows_with_calls_of_tools_converted_for_the_template"
    for given, is_taken in ((ARGUMENTS, forms.as_object), (AS_JSON, forms.as_text)):
        (prompt, completion), notes = texts(folders[family], record(call(given)))
        assert expected in completion
        assert "\\" not in completion
        assert PYTHON not in completion
        assert notes[noted] == (not is_taken)
        answered = (*call(given), {"role": "tool", "content": "rain"})
        (prompt, _), notes = texts(
            folders[family], record(({"role": "assistant", "content": "Rain."},), answered)
        )
        assert expected in prompt
        assert notes[noted] == (not is_taken)


@pytest.mark.parametrize("family", [*WRITTEN, "WITHOUT_TOOLS"])
def test_a_template_is_asked_how_it_takes_arguments(folders, family):
    tokenizer = load_tokenizer(folders[family], TokenOptions())
    forms = ToolForms.of(TemplateProbe(tokenizer.hf, tokenizer.template))
    assert forms.arguments == WRITTEN.get(family, (None, Shown()))[1]


def test_one_conversation_is_one_prompt_in_either_form(folders):
    answer = ({"role": "assistant", "content": "Rain."},)
    found = {"role": "tool", "content": "rain"}
    both = [record(answer, (*call(given), found)) for given in (ARGUMENTS, AS_JSON)]
    rows = [encode(folders["HERMES"], row)[0].rows[0] for row in both]
    first, second = prompt_keys_of([row.record for row in rows]).prompt
    assert first == second
    tokenizer = load_tokenizer(folders["HERMES"], TokenOptions())
    assert [encode_prompt(row, tokenizer) for row in both] == [row.prompt for row in rows]


@pytest.mark.parametrize("given", ["", " \n", "{}"])
def test_a_call_without_arguments_may_have_no_text_of_them(folders, given):
    (_, completion), _ = texts(folders["LLAMA_3_1"], record(call(given)))
    assert completion.startswith('{"name": "weather", "parameters": {}}')


@pytest.mark.parametrize(
    "given", ["{city: Łódź}", '{"city": ', "[1]", "3", json.dumps(AS_JSON), "[" * 100_000]
)
def test_text_that_is_no_object_is_refused_where_the_template_wants_one(folders, given):
    bad = rejected(folders["QWEN_2_5"], record(call(given)))
    assert bad.reason == "schema"
    assert "arguments of weather" in bad.detail
    assert texts(folders["QWEN_3"], record(call("{city: Łódź}")))  # as it stands


def test_a_call_that_lacks_function_is_converted_too(folders):
    flat = ({"role": "assistant", "tool_calls": [{"name": "weather", "arguments": AS_JSON}]},)
    (_, completion), _ = texts(folders["HERMES"], record(flat))
    assert f'{{"arguments": {AS_JSON}, "name": "weather"}}' in completion


def test_parameters_of_tools_given_as_text_are_written_once(folders):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    for wrap in (lambda function: {"type": "function", "function": function}, dict):
        given, meant = (
            wrap({"name": "weather", "parameters": form})
            for form in (json.dumps(parameters), parameters)
        )
        (prompt, _), _ = texts(
            folders["HERMES"], record(call(ARGUMENTS), tools=(given, {"name": "bare"}))
        )
        assert f'<tools>{json.dumps(meant)}{{"name": "bare"}}</tools>' in prompt


def test_rows_that_use_no_tools_are_what_they_were(folders):
    plain = record(({"role": "assistant", "content": "Rain."},))
    tokenizer = load_tokenizer(folders["HERMES"], TokenOptions())
    assert tokenizer.fitted(plain) is plain
    text = replace(plain, prompt="hi", completions=(" Rain.",))
    assert tokenizer.fitted(text) is text
    with_object = record(call(ARGUMENTS), tools=({"name": "f", "parameters": {}},))
    assert tokenizer.fitted(with_object) == with_object


def test_a_completion_of_calls_that_no_template_writes_is_refused(folders):
    bad = rejected(folders["WITHOUT_TOOLS"], record(call(ARGUMENTS)))
    assert (bad.reason, "calls" in bad.detail) == ("template_error", True)
    spoken = ({"role": "assistant", "content": "Let me look."} | call(ARGUMENTS)[0],)
    (_, completion), _ = texts(folders["WITHOUT_TOOLS"], record(spoken))
    assert completion == "Let me look.<|im_end|>"
