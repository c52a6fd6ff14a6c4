from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from align.stages.demo.preferences import draw_preferences, transcript
from align.stages.demo.tiny_tokenizer import make_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from align.stages.demo.tiny_world import TinyWorld

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "What does a cow say?"}
ASSISTANT = {"role": "assistant", "content": "Sure! A cow says moo."}
TOOL = {"type": "function", "function": {"name": "listen", "parameters": {"animal": "string"}}}


def render(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, str], **options: Any) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def test_training_again_saves_the_same_bytes(pretrained_world: TinyWorld, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    saved = sorted(tmp_path.iterdir())
    assert [path.name for path in saved] == sorted(
        path.name for path in pretrained_world.tokenizer.iterdir()
    )
    for path in saved:
        assert path.read_bytes() == (pretrained_world.tokenizer / path.name).read_bytes(), path.name


def test_any_text_comes_back_from_its_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in (
        "Zoë walks to the café 😊",
        "  two  spaces\n\n",
        "\u4f60\u597d",
        "<|im_start|>user",
    ):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text


def test_plain_text_begins_with_one_bos_and_has_no_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("A cow says moo.").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids


def test_a_conversation_has_one_bos_and_ends_in_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.apply_chat_template([SYSTEM, USER, ASSISTANT], return_dict=False)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 3  # one for each turn


def test_the_template_writes_turns_in_this_form(tokenizer: PreTrainedTokenizerFast) -> None:
    assert render(tokenizer, SYSTEM, USER, ASSISTANT) == (
        "<|bos|><|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nWhat does a cow say?<|im_end|>\n"
        "<|im_start|>assistant\nSure! A cow says moo.<|im_end|>"
    )


def test_the_generation_prompt_is_a_prefix_of_the_answered_conversation(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    waiting = render(tokenizer, USER, add_generation_prompt=True)
    answered = render(tokenizer, USER, ASSISTANT)
    assert answered == f"{waiting}{ASSISTANT['content']}<|im_end|>"


def test_tools_are_printed_as_json_in_the_system_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    for messages in ([SYSTEM, USER], [USER]):
        text = render(tokenizer, *messages, tools=[TOOL])
        system_turn = text.removeprefix("<|bos|><|im_start|>system\n").split("<|im_end|>")[0]
        assert json.loads(system_turn.splitlines()[-1]) == TOOL
        assert system_turn.startswith("Be kind.") == (SYSTEM in messages)
        assert text.count("<|im_start|>") == 2


def test_no_token_spans_prompt_and_completion(tokenizer: PreTrainedTokenizerFast) -> None:
    for each in draw_preferences(50, seed=5):
        prompt = transcript(each.prompt)
        prompt_ids = tokenizer(prompt).input_ids
        ids = tokenizer(f"{prompt} {each.chosen.text}").input_ids
        assert ids[: len(prompt_ids)] == prompt_ids
