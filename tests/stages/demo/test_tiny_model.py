from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from align.stages.demo.preferences import Answer, draw_preferences
from align.stages.demo.tiny_world import ModelShape, make_model

pytestmark = pytest.mark.numeric

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from align.stages.demo.tiny_world import TinyWorld

SMALL = ModelShape(hidden_size=64, layers=2, intermediate_size=128)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_same_seed_trains_the_same_weights(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        make_model(tmp_path / name, tokenizer, shape=SMALL, pretrain_steps=2, seed=seed)
    assert weights(tmp_path / "one") == weights(tmp_path / "same")
    assert weights(tmp_path / "one") != weights(tmp_path / "other")


def test_making_a_model_leaves_the_callers_random_numbers_alone(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    make_model(tmp_path, tokenizer, shape=SMALL, pretrain_steps=1, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_a_model_without_pretraining_is_close_to_uniform(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    made = make_model(tmp_path, tokenizer, shape=SMALL, pretrain_steps=0)
    assert made.logp_before == made.logp_after == pytest.approx(-log(1024), abs=0.2)


def test_pretraining_leaves_uniform_far_behind(pretrained_world: TinyWorld) -> None:
    assert pretrained_world.pretraining.logp_before < -6.5
    assert -3.5 < pretrained_world.pretraining.logp_after < 0
    assert pretrained_world.pretraining.num_parameters < 1_000_000


def test_good_and_bad_answers_are_both_likelier_than_chance(
    pretrained_world: TinyWorld, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = AutoModelForCausalLM.from_pretrained(pretrained_world.model)

    def logp_per_token(messages: list[dict[str, str]], answer: Answer) -> float:
        start = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        messages = [*messages, {"role": "assistant", "content": answer.text}]
        ids = torch.tensor([tokenizer.apply_chat_template(messages, return_dict=False)])
        with torch.no_grad():
            logps = model(ids).logits[0, :-1].log_softmax(-1)
        return logps.gather(1, ids[0, 1:, None])[len(start) - 1 :].mean().item()

    drawn = list(draw_preferences(30, seed=11))
    chosen = [logp_per_token(list(map(dict, each.prompt)), each.chosen) for each in drawn]
    rejected = [logp_per_token(list(map(dict, each.prompt)), each.rejected) for each in drawn]
    assert -4.5 < sum(chosen) / 30 < 0  # uniform: -6.9
    assert -4.5 < sum(rejected) / 30 < 0


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embedding_only_when_tied(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, tied: bool
) -> None:
    shape = ModelShape(hidden_size=64, layers=2, intermediate_size=128, tied=tied)
    make_model(tmp_path, tokenizer, shape=shape, pretrain_steps=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) == tied


def test_generation_stops_at_eos(
    pretrained_world: TinyWorld, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = GenerationConfig.from_pretrained(pretrained_world.model)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id
