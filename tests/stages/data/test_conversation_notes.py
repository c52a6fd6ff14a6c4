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
SPACED = WITHOUT_TOOLS.replace("m.content", "m.content.replace('</think>', '\n</think>\n\n')")
AS_JSON = WITHOUT_TOOLS.replace("m.content", "m.content | tojson")
SAID = bot("a")
TOOL = {"role": "tool", "content": "found"}
THOUGHT = bot("Rain.\n") | {"reasoning_content": "Clouds\nare grey."}
EARLIER = bot("Sun.") | {"reasoning_content": "Birds."}
THINKS = bot("<think>Clouds.</think>Rain.")
CALL = {"tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}]}
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
CALLING = bot("Let me see.") | CALL
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
    found = notes(WITHOUT_TOOLS, (SAID, USER, SAID), (SAID, TOOL, SAID, USER, SAID), (SAID,))
    assert found["rows_with_turns_of_others_in_completions"] == 1
    assert found["turns_of_others_in_completions"] == 3
    alone = notes(WITHOUT_TOOLS, (SAID,), prompt=(USER, SAID, TOOL, SAID, USER))
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
        (AS_JSON, (), bot('"Rain"\n'), *NOTHING),
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
    tools = TOOLS if said is CALLING else None
    found = notes(template, (said,), prompt=(USER, *before), tools=tools)
    lost = {
        f"rows_with_{part}_text_that_the_template_leaves_out_in_'{name}'"
        for part, names in (("prompt", in_prompt), ("completion", in_completion))
        for name in names
    }
    assert set(found) - {"rows_of_conversations"} == lost
