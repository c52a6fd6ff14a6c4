"""Prompts that end with an assistant's message, which the completion continues."""

import pytest

from align.schemas.config import TokenOptions
from align.stages.data.tokenizer import load_tokenizer
from support.byte_tokenizers import CHATML, CHATML_SPECIALS, FAMILIES, byte_tokenizer
from support.encoded_texts import USER, conversation, encode_one, refusal_of, texts_of
from support.read_rows import bot, user

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
    thinking = {"specials": CHATML_SPECIALS, "template": THINKING, "eos": "<|im_end|>"}
    return {
        name: byte_tokenizer(tmp_path_factory.mktemp("tok"), **family)
        for name, family in (FAMILIES | {"thinking": thinking}).items()
    }


def record(prefill, *completions):
    """A prompt that ends so, and completions each of one text or of messages."""
    turns = ((bot(one),) if isinstance(one, str) else one for one in completions)
    return conversation(*turns, prompt=(USER, bot(prefill)))


def texts(folder, item):
    """The prompt and its completions as the texts of their tokens."""
    found, notes = texts_of(folder, item)
    assert not notes["rows_whose_template_changes_the_prompt"]
    return found


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
def test_the_prompts_last_turn_stays_open_as_transformers_leaves_it_and_is_continued(
    prefilled_families, family
):
    opened, end = BY_HAND[family]
    found = texts(prefilled_families[family], record("Sure,", " here", " no"))
    assert found == [opened, f" here{end}", f" no{end}"]
    item = record("Sure, ", "here")
    row, _ = encode_one(prefilled_families[family], item)
    tokenizer = load_tokenizer(prefilled_families[family], TokenOptions())
    expected = tokenizer.hf.apply_chat_template(
        list(item.prompt), continue_final_message=True, tokenize=True, return_dict=False
    )
    begun = expected if expected[0] == row.prompt[0] else [row.prompt[0], *expected]
    assert row.prompt == begun
    text = tokenizer.hf.apply_chat_template([USER, bot("Sure, here")], tokenize=False)
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert [*row.prompt, *row.completions[0]][: len(ids) - 2] == ids[: len(ids) - 2]


CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"q": 1}}}]}


ASKED = (user("why"), bot("so"))
WHY = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nso<|im_end|>"


def test_what_follows_the_prefill_is_written_as_its_template_writes_it(prefilled_families):
    called = '<tool_call>\n{"name": "f", "arguments": {"q": 1}}\n</tool_call><|im_end|>'
    for completion, opened, written in (
        ((bot(" here"), *ASKED), "Sure,", f" here<|im_end|>\n{WHY}"),
        ((CALLING,), "Sure,", called),
        (ASKED, "Sure,<|im_end|>\n", WHY),  # the user answers, which closes the turn
    ):
        prompt, said = texts(prefilled_families["qwen base"], record("Sure,", completion))
        assert prompt.endswith(f"<|im_start|>assistant\n{opened}")
        assert said == written
    both = record("Sure,", " here", ASKED)
    bad = refusal_of(prefilled_families["qwen base"], both)
    assert (bad.reason, "others answer it" in bad.detail) == ("schema", True)


def test_a_prefill_that_the_template_does_not_show_is_refused_and_not_mangled(
    tmp_path, prefilled_families
):
    hidden = CHATML.replace("{{ m.content }}", "{{ m.content.split('#')[-1] }}")
    folder = byte_tokenizer(tmp_path, CHATML_SPECIALS, template=hidden, eos="<|endoftext|>")
    assert refusal_of(folder, record("Sure,", " here # there")).reason == "template_error"
    assert texts(folder, record("Sure,", " here"))[1] == " here<|im_end|>"
    # This template takes reasoning for such only once it has ended, and never in earlier turns.
    ended = record("<think>\nLet me", " see\n</think>\n\n42")
    for item in (ended, record("Sure,", (bot(" here"), *ASKED))):
        assert refusal_of(prefilled_families["thinking"], item).reason == "template_error"
