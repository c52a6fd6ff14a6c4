"""Every line of the table trains from end to end."""

import json
import math

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from align.stages.methods.table import METHODS
from support.command import align

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


def trained(cache, run, method, **options):
    """Three steps; the numbers of each, as they stand in its folder."""
    sets = [word for name, value in options.items() for word in ("--set", f"method.{name}={value}")]
    small = ("--max-steps", STEPS, "--batch-size", 8, "--lr", 1e-3, "--eval-fraction", 0.2)
    words = ("--method", method, "--cache", cache, "--output", run, "--no-mlflow")
    answer = align("train", *words, *small, *sets)
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


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_a_model_of_its_kind(everything, tmp_path, name):
    trained(everything, tmp_path / "run", name)
    kind = AutoModelForCausalLM
    if METHODS[name].head == "score":
        kind = AutoModelForSequenceClassification
    kind.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_trains(everything, tmp_path, name):
    trained(everything, tmp_path / "run", name)


@pytest.mark.parametrize("name", MODIFIED)
def test_a_modified_method_trains_otherwise(everything, tmp_path, name):
    plain = trained(everything, tmp_path / "plain", name)
    modified = trained(everything, tmp_path / "modified", name, **MODIFIED[name])
    assert plain != modified
