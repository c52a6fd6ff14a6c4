"""Every line of the table trains, and so do mixtures and what modifies a method."""

import math

import pytest

from align.stages.engine.distributed import joined_world
from align.stages.methods.table import METHODS
from support.training_world import job_of, learn

MODIFIED = {
    "dpo": {"f_divergence": "js", "ld_alpha": 0.5, "margin": "margin", "row_weight": "weight"},
    "cdpo": {"wpo": True},
    "kto": {"humanline": True, "log_eps_p": -1e-4, "log_eps_r": 1e-4},
}


@pytest.fixture(scope="module")
def one_rank():
    with joined_world() as world:
        yield world


def trained(training_world, world, method, **options):
    """Two steps and two evaluations; the losses of the steps."""
    job = job_of(training_world.everything, method, options=options, max_steps=2, eval_fraction=0.2)
    _, recorded = learn(job, world)
    assert [step for step, _ in recorded.evaluations] == [0, 2]
    assert any("eval/loss" in metrics or "loss" in metrics for _, metrics in recorded.evaluations)
    for step, metrics in (*recorded.steps, *recorded.evaluations):
        assert all(math.isfinite(value) for value in metrics.values()), (step, metrics)
    return [metrics["loss"] for _, metrics in recorded.steps]


@pytest.mark.parametrize("name", [*METHODS, "dpo:0.8+bco_pair:0.2+sft:1", "kto+sft:0.5"])
def test_a_method_trains(training_world, one_rank, name):
    assert len(trained(training_world, one_rank, name)) == 2


@pytest.mark.parametrize("name", MODIFIED)
def test_a_modified_method_trains_otherwise(training_world, one_rank, name):
    plain = trained(training_world, one_rank, name)
    assert trained(training_world, one_rank, name, **MODIFIED[name]) != plain
