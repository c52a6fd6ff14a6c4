"""Held-out pairs are told apart better after a run than before it."""

import pytest
from transformers import AutoTokenizer

from align.pipeline.train import run_training
from support.stage_one import Silent
from support.training_world import job_of, make_pairs, scored

pytestmark = pytest.mark.numeric
# Three ways through some 240 pairs, 16 at a time; 60 are held out.
LEARNING = {"epochs": 3, "batch_size": 16, "lr": 3e-3, "eval_fraction": 0.2}


@pytest.fixture(scope="module")
def three_hundred_pairs(tokenizer_folder, tmp_path_factory):
    """Three hundred pairs, and a model that has seen a little of the language."""
    folder = tmp_path_factory.mktemp("learning")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    make_pairs(folder, tokenizer, rows=300, pretrain_steps=15)
    return scored(folder, "pairs", kl_pairs=1)


def learned(cache, method, folder):
    trained = run_training(job_of(cache, method, output=str(folder), **LEARNING), progress=Silent())
    before, after = trained.measured.before, trained.measured.after
    assert after["eval/loss"] < 0.9 * before["eval/loss"]
    return before, after


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_rewards_learn_to_separate_good_answers_from_bad(three_hundred_pairs, tmp_path, method):
    before, after = learned(three_hundred_pairs, method, tmp_path / "run")
    # Of a policy that is the reference every reward is 0 but for rounding.
    assert (before["eval/rewards/accuracies"], before["eval/rewards/ties"]) == (0.5, 1.0)
    assert after["eval/rewards/accuracies"] > 0.8
    assert after["eval/rewards/margins"] > 1


def test_orpo_comes_to_prefer_good_answers(three_hundred_pairs, tmp_path):
    before, after = learned(three_hundred_pairs, "orpo", tmp_path / "run")
    assert after["eval/log_odds/accuracy"] > before["eval/log_odds/accuracy"] + 0.2
    assert after["eval/log_odds/ratio"] > before["eval/log_odds/ratio"]
