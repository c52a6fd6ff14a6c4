"""A run needs one model and a cache, and tells held-out pairs apart better than before it."""

import math
import shutil
from unittest import mock

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from align.schemas.errors import UsageError
from align.stages.engine.distributed import joined_world
from align.stages.methods.table import METHODS
from support.refusals import refuses
from support.training_world import job_of, learn, make_pairs, scored, trained

# Three ways through some 160 pairs, 16 at a time; 40 are held out.
LEARNING = {"epochs": 3, "batch_size": 16, "lr": 3e-3, "eval_fraction": 0.2}


@pytest.fixture(scope="module")
def two_hundred_pairs(tokenizer_folder, tmp_path_factory):
    """Two hundred pairs, and a model that has seen a little of the language."""
    folder = tmp_path_factory.mktemp("learning")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    make_pairs(folder, tokenizer, rows=200, pretrain_steps=15)
    return scored(folder, "pairs", kl_pairs=1)


@pytest.mark.numeric
def test_methods_learn_to_separate_good_answers_from_bad(two_hundred_pairs, tmp_path):
    for method in ("kto", "orpo"):
        job = job_of(two_hundred_pairs, method, output=str(tmp_path / method), **LEARNING)
        measured = trained(job).measured
        before, after = measured.before, measured.after
        assert after["eval/loss"] < 0.9 * before["eval/loss"]
        if method == "orpo":
            assert after["eval/log_odds/accuracy"] > before["eval/log_odds/accuracy"] + 0.2
            continue
        # Of a policy that is the reference every reward is 0 but for rounding.
        assert (before["eval/rewards/accuracies"], before["eval/rewards/ties"]) == (0.5, 1.0)
        assert after["eval/rewards/accuracies"] > 0.8
        assert after["eval/rewards/margins"] > 1


@pytest.mark.numeric
def test_a_run_needs_only_the_cache_of_the_reference(training_world, tmp_path):
    shutil.copytree(training_world.model, tmp_path / "model")
    shutil.copy(training_world.pairs.with_suffix(".parquet"), tmp_path)
    cache = scored(tmp_path, "pairs", kl_pairs=1)
    policy = (tmp_path / "model").rename(tmp_path / "policy")
    settings = {"output": str(tmp_path / "run"), "max_steps": 1, "eval_fraction": 0.15}
    with refuses(UsageError, tmp_path / "model", "--model"):
        job_of(cache, "kto", **settings)
    job = job_of(cache, "kto", model=str(policy), **settings)
    assert job.begins_as_reference
    make = LlamaForCausalLM.__init__
    with mock.patch.object(LlamaForCausalLM, "__init__", autospec=True, side_effect=make) as made:
        trained(job)
    assert [call.args[0].device.type for call in made.call_args_list] == ["cpu"]


MODIFIED = {
    "dpo": {"f_divergence": "js", "ld_alpha": 0.5, "margin": "margin", "row_weight": "weight"},
    "cdpo": {"wpo": True},
    "kto": {"humanline": True, "log_eps_p": -1e-4, "log_eps_r": 1e-4},
}


@pytest.fixture(scope="module")
def one_rank():
    with joined_world() as world:
        yield world


def last_loss(training_world, world, method, steps=1, **options):
    """Two evaluations, before and after some steps; the loss of the last."""
    short = {"max_steps": steps, "eval_fraction": 0.2}
    job = job_of(training_world.everything, method, options=options, **short)
    _, recorded = learn(job, world)
    assert [step for step, _ in recorded.evaluations] == [0, steps]
    assert any("eval/loss" in metrics or "loss" in metrics for _, metrics in recorded.evaluations)
    for step, metrics in (*recorded.steps, *recorded.evaluations):
        assert all(math.isfinite(value) for value in metrics.values()), (step, metrics)
    return recorded.steps[-1][1]["loss"]


@pytest.mark.parametrize("name", [*METHODS, "dpo:0.8+bco_pair:0.2+sft:1", "kto+sft:0.5"])
def test_a_method_trains(training_world, one_rank, name):
    last_loss(training_world, one_rank, name)


@pytest.mark.parametrize("name", MODIFIED)
def test_a_modified_method_trains_otherwise(training_world, one_rank, name):
    plain = last_loss(training_world, one_rank, name, steps=2)
    assert last_loss(training_world, one_rank, name, steps=2, **MODIFIED[name]) != plain
