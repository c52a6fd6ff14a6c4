"""Runs whose policy has a head of another kind: what they leave behind, read by others."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from align.schemas.rows import Role
from support.rounding import NATS
from support.stage_one import Heard
from support.training_world import job_of, trained

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings(  # peft's own, while it saves an adapter
        "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
        "ignore:Setting .save_embedding_layers. to:UserWarning",
    ),
]
LABELS = {"pairs": (Role.CHOSEN, Role.REJECTED), "labels": (Role.DESIRABLE, Role.UNDESIRABLE)}


@pytest.mark.parametrize(("method", "cache"), [("reward", "pairs"), ("reward_binary", "labels")])
def test_others_load_a_reward_model(training_world, tmp_path, method, cache):
    folder = getattr(training_world, cache)
    run = trained(job(folder, method, tmp_path, epochs=4))
    assert run.measured.after["eval/loss"] < 0.9 * run.measured.before["eval/loss"]
    model = AutoModelForSequenceClassification.from_pretrained(run.folder.model)
    assert scores_are_those_of(run, model, folder, LABELS[cache])
    tokenizer = AutoTokenizer.from_pretrained(run.folder.model)
    assert tokenizer.pad_token_id in (model.config.pad_token_id, None)
    if method == "reward":  # from which another one learns on
        begun = {"model": str(run.folder.model)}
        second = trained(job(folder, method, tmp_path / "second", max_steps=1, **begun))
        expected = run.measured.after["eval/loss"]
        assert second.measured.before["eval/loss"] == pytest.approx(expected, abs=NATS)


def test_a_value_head_is_saved_next_to_the_model_and_not_in_it(training_world, tmp_path):
    run = trained(job(training_world.everything, "ppo", tmp_path / "run"))
    head = load_file(run.folder.model / "value_head.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == {
        "weight": (1, 32),
        "bias": (1,),
    }
    assert all(tensor.any() for tensor in head.values())
    before = load_file(training_world.model / "model.safetensors")
    assert load_file(run.folder.model / "model.safetensors").keys() == before.keys()
    AutoModelForCausalLM.from_pretrained(run.folder.model)
    assert "NaN" not in run.folder.metrics.read_text()
    # From which another one learns on: it begins with the values that this one ended with.
    begun = {"model": str(run.folder.model), "other_reference": True, "max_steps": 1}
    said = Heard()
    second = trained(job(training_world.everything, "ppo", tmp_path / "second", **begun), said)
    name = "eval/values/mean"
    assert run.measured.after[name] != run.measured.before[name] == 0.0
    assert second.measured.before[name] == pytest.approx(run.measured.after[name], abs=1e-5)
    assert [line for line in said.lines if str(run.folder.model / "value_head") in line]


def job(cache, method, folder, **settings):
    """All rows of the cache are evaluated as well."""
    return job_of(cache, method, output=str(folder), eval_cache=str(cache), **settings)


@torch.no_grad()
def scores_are_those_of(run, model, cache, roles):
    """Whether the mean scores of both labels are what the last evaluation of the run found."""
    scores = {role: [] for role in roles}
    for row in pq.read_table(Path(cache) / "data").to_pylist():
        for completion, role in zip(row["completion_ids"], row["role"], strict=True):
            if role in scores:
                ids = torch.tensor([row["prompt_ids"] + completion])
                scores[role].append(model(input_ids=ids).logits.item())
    found = [sum(each) / len(each) for each in scores.values()]
    names = ("eval/rewards/chosen", "eval/rewards/rejected")
    last = json.loads((run.folder.metrics).read_text().splitlines()[-1])
    return found == pytest.approx([last[name] for name in names], abs=NATS)
