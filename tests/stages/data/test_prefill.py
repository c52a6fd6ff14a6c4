"""Prompts that end with an assistant's message, which the completion continues."""

import pytest

from align.schemas.config import TokenOptions
from align.schemas.rows import Record, Role
from align.stages.data.encode import Encoder
from align.stages.data.tokenizer import load_tokenizer
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, FAMILIES, byte_tokenizer

USER = {"role": "user", "content": "hi"}
# Shows the reasoning of the last message alone, and writes an empty one where it has none.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set parts = m.content.split('</think>') %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ parts[0].replace('<think>', '').strip('\n') if parts | length > 1 }}\n</think>\n\n"
    "{{ parts[-1].lstrip('\n') }}{% else %}{{ parts[-1].lstrip('\n') }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def prefilled_families(tmp_path_factory):
    families = {
        **FAMILIES,
        "thinking": {
            "specials": CHATML_SPECIALS,
            "template": THINKING,
            "eos": "<|im_end|>",
        },
    }
    return {
        name: byte_tokenizer(tmp_path_factory.mktemp("tok"), **family)
        for name, family in families.items()
    }


def bot(content):
    return {"role": "assistant", "content": content}


def record(prefill, *completions):
    turns = tuple((bot(c),) if isinstance(c, str) else tuple(c) for c in completions)
    roles = (Role.CANDIDATE,) * len(turns)
    return Record(0, 0, (USER, bot(prefill)), turns, roles, (None,) * len(turns))


def encode(folder, item):
    rules = TokenOptions()
    tokenizer = load_tokenizer(folder, rules)
    return Encoder(tokenizer, rules).encode([item]), tokenizer


def texts_of(folder, item):
    """The prompt and its completions as the texts of their tokens."""
    result, tokenizer = encode(folder, item)
    assert not result.rejected, result.rejected
    assert not result.notes["rows_whose_template_changes_the_prompt"]
    (row,) = result.rows
    return [tokenizer.hf.decode(ids) for ids in (row.prompt, *row.completions)]


BY_HAND = {
    "qwen base": ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure,", "<|im_end|>"),
    "gemma": (
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nSure,",
        "<end_of_turn>",
    ),
    "glm 4": ("[gMASK]<sop><|user|>\nhi<|assistant|>\nSure,", "<|user|>"),
    "gpt-oss": (
        "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>Sure,",
        "<|return|>",
    ),
    "llama 2 without an end": ("<s>[INST] hi [/INST] Sure,", "</s>"),
    "words only": ("user: hi\nassistant: Sure,", "\n</s>"),
    "thinking": (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nSure,",
        "<|im_end|>",
    ),
}


@pytest.mark.parametrize("family", BY_HAND)
def test_the_prompts_last_turn_stays_open_and_the_completion_continues_it(
    prefilled_families, family
):
    opened, end = BY_HAND[family]
    texts = texts_of(prefilled_families[family], record("Sure,", " here", " no"))
    assert texts == [opened, f" here{end}", f" no{end}"]


@pytest.mark.parametrize("family", BY_HAND)
def test_the_prompt_is_the_one_that_transformers_continues_the_final_message_of(
    prefilled_families, family
):
    item = record("Sure, ", "here")
    result, tokenizer = encode(prefilled_families[family], item)
    (row,) = result.rows
    expected = tokenizer.hf.apply_chat_template(
        list(item.prompt), continue_final_message=True, tokenize=True, return_dict=False
    )
    begun = expected if expected[0] == row.prompt[0] else [row.prompt[0], *expected]
    assert row.prompt == begun
    whole = [USER, bot("Sure, here")]
    text = tokenizer.hf.apply_chat_template(whole, tokenize=False)
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert [*row.prompt, *row.completions[0]][: len(ids) - 2] == ids[: len(ids) - 2]


def test_messages_behind_the_continued_one_are_turns_of_their_own(prefilled_families):
    more = (bot(" here"), {"role": "user", "content": "why"}, bot("so"))
    _, completion = texts_of(prefilled_families["qwen base"], record("Sure,", more))
    assert completion == (
        " here<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nso<|im_end|>"
    )


def test_a_tool_may_be_called_behind_the_prefill(prefilled_families):
    call = {"function": {"name": "search", "arguments": {"q": 1}}}
    calling = ({"role": "assistant", "tool_calls": [call]},)
    _, completion = texts_of(prefilled_families["qwen base"], record("Sure,", calling))
    assert completion == (
        '<tool_call>\n{"name": "search", "arguments": {"q": 1}}\n</tool_call><|im_end|>'
    )


def test_an_answer_of_the_user_closes_the_turn(prefilled_families):
    reply = ({"role": "user", "content": "why"}, bot("so"))
    prompt, completion = texts_of(prefilled_families["qwen base"], record("Sure.", reply))
    assert prompt.endswith("<|im_start|>assistant\nSure.<|im_end|>\n")
    assert completion == ("<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nso<|im_end|>")


def test_completions_of_both_kinds_in_one_row_are_refused(prefilled_families):
    result, _ = encode(prefilled_families["qwen base"], record("Sure,", " here", (USER, bot("so"))))
    (bad,) = result.rejected
    assert (bad.reason, "others answer it" in bad.detail) == ("schema", True)


def test_a_prefill_that_the_template_does_not_show_is_refused_and_not_mangled(
    tmp_path, prefilled_families
):
    hidden = CHATML.replace("{{ m.content }}", "{{ m.content.split('#')[-1] }}")
    folder = byte_tokenizer(tmp_path, CHATML_SPECIALS, template=hidden, eos="<|endoftext|>")
    result, _ = encode(folder, record("Sure,", " here # there"))
    assert [bad.reason for bad in result.rejected] == ["template_error"]
    assert texts_of(folder, record("Sure,", " here"))[1] == " here<|im_end|>"
    # This template takes reasoning for such only once it has ended, and never in earlier turns.
    ended = record("<think>\nLet me", " see\n</think>\n\n42")
    earlier = record("Sure,", (bot(" here"), {"role": "user", "content": "why"}, bot("so")))
    for item in (ended, earlier):
        result, _ = encode(prefilled_families["thinking"], item)
        assert [bad.reason for bad in result.rejected] == ["template_error"]
