"""The tokenizer, the model and the folder of the tiny world."""

from dataclasses import astuple
from math import log

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from align.schemas.errors import UsageError
from align.stages.demo.preferences import draw_preferences
from align.stages.demo.tiny_tokenizer import make_tokenizer
from align.stages.demo.tiny_world import ModelShape, make_model, make_world

SMALL = {"hidden_size": 64, "layers": 2, "intermediate_size": 128}


@pytest.fixture(scope="module")
def pretrained_world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), rows=20, pretrain_steps=30)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def test_training_again_saves_the_same_bytes(pretrained_world, tmp_path):
    make_tokenizer(tmp_path)
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == sorted(path.name for path in pretrained_world.tokenizer.iterdir())
    for name in saved:
        assert (tmp_path / name).read_bytes() == (pretrained_world.model / name).read_bytes(), name


@pytest.mark.numeric
def test_a_seed_is_one_model_near_uniform_and_leaves_other_random_numbers_alone(
    tokenizer, tmp_path
):
    torch.manual_seed(9)
    expected = torch.rand(3)
    weights = []
    for seed, tied in ((1, True), (1, True), (2, True), (2, False)):
        torch.manual_seed(9)
        folder = tmp_path / str(len(weights))
        shape = ModelShape(**SMALL, tied=tied)
        made = make_model(folder, tokenizer, shape=shape, pretrain_steps=2, seed=seed)
        assert made.logp_before == pytest.approx(-log(1024), abs=0.2)
        assert torch.equal(torch.rand(3), expected)
        weights.append((folder / "model.safetensors").read_bytes())
        model = AutoModelForCausalLM.from_pretrained(folder)
        is_tied = torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
        assert is_tied == tied
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.numeric
def test_pretraining_makes_good_and_bad_answers_likelier_than_chance(pretrained_world, tokenizer):
    assert pretrained_world.pretraining.logp_before < -6.5  # uniform: -6.9
    assert -3.5 < pretrained_world.pretraining.logp_after < 0
    assert pretrained_world.pretraining.num_parameters < 1_000_000
    model = AutoModelForCausalLM.from_pretrained(pretrained_world.model)

    def logp_per_token(messages, answer):
        start = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        messages = [*messages, {"role": "assistant", "content": answer.text}]
        ids = torch.tensor([tokenizer.apply_chat_template(messages, return_dict=False)])
        with torch.no_grad():
            logps = model(ids).logits[0, :-1].log_softmax(-1)
        return logps.gather(1, ids[0, 1:, None])[len(start) - 1 :].mean().item()

    for side in ("chosen", "rejected"):
        drawn = draw_preferences(30, seed=11)
        logps = [logp_per_token([*map(dict, one.prompt)], getattr(one, side)) for one in drawn]
        assert -4.5 < sum(logps) / 30 < 0


def test_a_world_is_whole_stops_at_eos_and_is_not_overwritten(pretrained_world, tokenizer):
    assert all(path.exists() for path in astuple(pretrained_world.data))
    config = GenerationConfig.from_pretrained(pretrained_world.model)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id
    kept = sorted(pretrained_world.model.parent.iterdir())
    with pytest.raises(UsageError, match="not empty"):
        make_world(pretrained_world.model.parent, rows=5, pretrain_steps=0)
    assert sorted(pretrained_world.model.parent.iterdir()) == kept
