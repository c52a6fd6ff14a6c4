"""Every line of the table trains from end to end, and MLflow hears of it."""

import json
import math

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from align.stages.methods.table import METHODS
from support.command import align
from support.mlflow_runs import open_store

STEPS = 3
MIXTURES = ("dpo:0.8+bco_pair:0.2+sft:1", "kto+sft:0.5")
MODIFIED = {
    "dpo": {"f_divergence": "js", "ld_alpha": 0.5, "margin": "margin", "row_weight": "weight"},
    "cdpo": {"wpo": "true"},
    "kto": {"humanline": "true", "log_eps_p": -1e-4, "log_eps_r": 1e-4},
}


@pytest.fixture(scope="module")
def everything(training_world):
    return training_world.everything


def trained(cache, store, run, method, **options):
    """Three steps; the numbers of each, as they stand in its folder."""
    sets = {"tracking.uri": store, **{f"method.{key}": value for key, value in options.items()}}
    settings = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    small = ("--max-steps", STEPS, "--batch-size", 8, "--lr", 1e-3, "--eval-fraction", 0.2)
    words = ("--method", method, "--cache", cache, "--output", run)
    answer = align("train", *words, *small, *settings)
    assert answer.code == 0, answer
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert sorted(steps) == [1, 2, 3]
    assert all(
        math.isfinite(value) for line in lines for value in line.values() if is_number(value)
    )
    return steps


def is_number(value):
    return isinstance(value, int | float)


def told(store, run):
    """The losses MLflow has of a run."""
    client = open_store(store)
    run_id = json.loads((run / "_align" / "mlflow.json").read_text())["run_id"]
    found = client.get_metric_history(run_id, "loss")
    assert client.get_run(run_id).info.status == "FINISHED"
    return {metric.step: metric.value for metric in found}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_and_its_numbers_are_in_mlflow(everything, uri, tmp_path, name):
    steps = trained(everything, uri, tmp_path / "run", name)
    assert told(uri, tmp_path / "run") == pytest.approx(steps)
    kind = AutoModelForCausalLM
    if METHODS[name].head == "score":
        kind = AutoModelForSequenceClassification
    kind.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_trains(everything, uri, tmp_path, name):
    trained(everything, uri, tmp_path / "run", name)


@pytest.mark.parametrize("name", MODIFIED)
def test_a_modified_method_trains_otherwise(everything, uri, tmp_path, name):
    plain = trained(everything, uri, tmp_path / "plain", name)
    modified = trained(everything, uri, tmp_path / "modified", name, **MODIFIED[name])
    assert plain != modified
