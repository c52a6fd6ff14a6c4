"""What a chat template leaves out of a row, and whose turns are learned."""

import pytest

from support.encoded_texts import USER, conversation, encode_one
from support.read_rows import bot
from support.tool_templates import QWEN_2_5, WITHOUT_TOOLS, chat_tokenizer

THINKING = WITHOUT_TOOLS.replace(
    "{{ m.content }}", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content | trim }}",
)  # fmt: skip
LAST_THOUGHTS = THINKING.replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}")
CUTS_THOUGHTS = WITHOUT_TOOLS.replace("m.content", "m.content.split('</think>')[-1]")
AS_JSON = WITHOUT_TOOLS.replace("m.content", "m.content | tojson")
LOST = "text_that_the_template_leaves_out_in"
SAID = bot("a")
THOUGHT = bot("Rain.\n") | {"reasoning_content": "Clouds\nare grey."}
UNREMARKABLE = {"rows_of_conversations": 1}


@pytest.fixture
def notes(tmp_path):
    """What is noted of completions of a prompt under a template."""

    def count(template, *completions, prompt=(USER,), **more):
        folder = chat_tokenizer(tmp_path, template)
        found = encode_one(folder, conversation(*completions, prompt=prompt, **more))[1]
        return {name: count for name, count in found.items() if count}

    return count


def lost(notes, part):
    start = f"rows_with_{part}_{LOST}_"
    return {name.removeprefix(start).strip("'") for name in notes if name.startswith(start)}


def test_turns_of_users_and_tools_inside_completions_are_counted(notes):
    tool = {"role": "tool", "content": "found"}
    found = notes(WITHOUT_TOOLS, (SAID, USER, SAID), (SAID, tool, SAID, USER, SAID), (SAID,))
    assert found["rows_with_turns_of_others_in_completions"] == 1
    assert found["turns_of_others_in_completions"] == 3
    alone = notes(WITHOUT_TOOLS, (SAID,), prompt=(USER, SAID, tool, SAID, USER))
    assert alone == UNREMARKABLE


def test_thinking_that_a_template_ignores_is_noted_and_what_it_writes_is_not(notes):
    assert lost(notes(WITHOUT_TOOLS, (THOUGHT,)), "completion") == {"reasoning_content"}
    assert notes(THINKING, (THOUGHT,), prompt=(USER, THOUGHT, USER)) == UNREMARKABLE
    older = bot("Rain.") | {"thinking": "Clouds."}
    assert lost(notes(WITHOUT_TOOLS, (older,)), "completion") == {"thinking"}


def test_thinking_that_only_earlier_turns_lose_is_the_prompts(notes):
    found = notes(
        LAST_THOUGHTS, (THOUGHT,), prompt=(USER, THOUGHT | {"reasoning_content": "B"}, USER)
    )
    assert (lost(found, "prompt"), lost(found, "completion")) == ({"reasoning_content"}, set())


def test_content_that_a_template_writes_in_part_is_noted(notes):
    said = bot("<think>Clouds.</think>Rain.")
    assert lost(notes(CUTS_THOUGHTS, (said,)), "completion") == {"content"}
    assert lost(notes(CUTS_THOUGHTS, (bot("Rain."),)), "completion") == set()
    spaced = WITHOUT_TOOLS.replace("m.content", "m.content.replace('</think>', '\n</think>\n\n')")
    assert not lost(notes(spaced, (said,)), "completion")
    assert not lost(notes(AS_JSON, (bot('"Rain"\n'),)), "completion")


def test_names_and_text_under_other_keys_are_noted_and_identifiers_are_not(notes):
    named = notes(WITHOUT_TOOLS, (SAID,), prompt=(USER | {"name": "Ann"},))
    assert lost(named, "prompt") == {"name"}
    more = {"id": "7f3a", "created": "2024-01-01 10:00:00 UTC", "rank": 3}
    assert notes(WITHOUT_TOOLS, (SAID | more,)) == UNREMARKABLE
    note = {"editor's note": "this one is not quite right"}
    assert lost(notes(WITHOUT_TOOLS, (SAID | note,)), "completion") == {"other keys"}
    tool = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "found"}
    assert not lost(notes(WITHOUT_TOOLS, (SAID,), prompt=(USER, SAID, tool)), "prompt")


def test_tools_and_calls_that_a_template_ignores_are_noted(notes):
    call = {"tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}]}
    said = (bot("Let me see.") | call,)
    tools = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
    found = notes(WITHOUT_TOOLS, said, prompt=(USER, *said, USER), tools=tools)
    assert lost(found, "prompt") == {"tools", "tool_calls"}
    assert lost(found, "completion") == {"tool_calls"}
    assert notes(QWEN_2_5, said, prompt=(USER, *said, USER), tools=tools) == UNREMARKABLE
