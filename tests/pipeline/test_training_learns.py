"""A run needs one model and a cache, and tells held-out pairs apart better than before it."""

import shutil

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from align.pipeline.train import run_training
from align.schemas.errors import UsageError
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


def test_methods_learn_to_separate_good_answers_from_bad(three_hundred_pairs, tmp_path):
    for method in ("kto", "orpo"):
        job = job_of(three_hundred_pairs, method, output=str(tmp_path / method), **LEARNING)
        measured = run_training(job, progress=Silent()).measured
        before, after = measured.before, measured.after
        assert after["eval/loss"] < 0.9 * before["eval/loss"]
        if method == "orpo":
            assert after["eval/log_odds/accuracy"] > before["eval/log_odds/accuracy"] + 0.2
            continue
        # Of a policy that is the reference every reward is 0 but for rounding.
        assert (before["eval/rewards/accuracies"], before["eval/rewards/ties"]) == (0.5, 1.0)
        assert after["eval/rewards/accuracies"] > 0.8
        assert after["eval/rewards/margins"] > 1


def test_a_run_makes_one_model_and_needs_nothing_of_the_reference_but_its_cache(
    training_world, tmp_path, monkeypatch
):
    shutil.copytree(training_world.model, tmp_path / "model")
    shutil.copy(training_world.pairs.with_suffix(".parquet"), tmp_path)
    cache = scored(tmp_path, "pairs", kl_pairs=1)
    policy = (tmp_path / "model").rename(tmp_path / "policy")
    settings = {"output": str(tmp_path / "run"), "max_steps": 1, "eval_fraction": 0.15}
    with pytest.raises(UsageError, match="the reference of the cache, is not there.*--model DIR"):
        job_of(cache, "kto", **settings)
    job = job_of(cache, "kto", model=str(policy), **settings)
    assert job.begins_as_reference
    models, make = [], LlamaForCausalLM.__init__

    def counted(model, *arguments, **named):
        models.append(model)
        make(model, *arguments, **named)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", counted)
    run_training(job, progress=Silent())
    # The other one has no weights: it was made on the meta device to read names and shapes from.
    assert [model.device.type for model in models] == ["meta", "cpu"]
