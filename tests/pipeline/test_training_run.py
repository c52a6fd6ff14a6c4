"""Whole runs of stage 2 in this process: what they need."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from align.pipeline.train import run_training
from align.schemas.errors import UsageError
from support.stage_one import Silent
from support.training_world import job_of, scored

QUICK = {"max_steps": 2, "eval_fraction": 0.15}


@pytest.fixture
def built(monkeypatch):
    """Every language model that is made, whoever makes it."""
    models, make = [], LlamaForCausalLM.__init__

    def counted(model, *arguments, **named):
        models.append(model)
        make(model, *arguments, **named)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", counted)
    return models


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo"])
def test_a_run_makes_one_model_and_no_second(training_world, built, tmp_path, method):
    job = job_of(training_world.pairs, method, output=str(tmp_path / "run"), **QUICK)
    trained = run_training(job, progress=Silent())
    # The other one has no weights: it was made on the meta device to read names and shapes from.
    assert [model.device.type for model in built] == ["meta", "cpu"]
    assert (trained.ending, trained.steps) == ("finished", 2)


def test_a_run_needs_nothing_of_the_reference_but_its_cache(training_world, tmp_path):
    shutil.copytree(training_world.model, tmp_path / "model")
    shutil.copy(training_world.pairs.with_suffix(".parquet"), tmp_path)
    cache = scored(tmp_path, "pairs", kl_pairs=1)
    policy = (tmp_path / "model").rename(tmp_path / "policy")
    settings = {"output": str(tmp_path / "run"), **QUICK}
    with pytest.raises(UsageError, match="the reference of the cache, is not there"):
        job_of(cache, "kto", **settings)
    job = job_of(cache, "kto", model=str(policy), **settings)
    assert job.begins_as_reference
    trained = run_training(job, progress=Silent())
    model = AutoModelForCausalLM.from_pretrained(trained.folder.model)
    before = load_file(policy / "model.safetensors")["model.norm.weight"]
    assert not torch.equal(model.model.norm.weight, before)
