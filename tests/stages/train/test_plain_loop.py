"""The whole of stage 2 beside sixty lines that hold both models and run one row at a time."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from support import plain_loop
from support.rounding import EPSILON, NATS, apart
from support.training_world import START, job_of, learn

LEARNING = {
    "max_steps": 5,
    "warmup": 0.0,
    "schedule": "constant",
    "max_grad_norm": 1.0,
    "epsilon": EPSILON,
}
pytestmark = pytest.mark.numeric
CASES = [("pairs", "dpo"), ("pairs", "kto"), ("labels", "kto"), ("pairs", "orpo")]


def plain_model(training_world):
    return AutoModelForCausalLM.from_pretrained(training_world.model, dtype=torch.float32)


def row_ids(session, steps):
    """Of each step, in step order: alone and with a large budget a step is one micro-batch."""
    with session.feed.steps(START.cursor) as batches:
        return [next(batches).own[0].row_ids for _ in range(steps)]


@pytest.mark.parametrize(("cache", "method"), CASES)
def test_training_ends_in_the_weights_of_a_plain_loop(training_world, one_rank, cache, method):
    folder = getattr(training_world, cache)
    session, recorded = learn(job_of(folder, method, **LEARNING), one_rank)
    model, stored = plain_model(training_world), plain_loop.rows_of(folder)
    steps = [[stored[row] for row in rows] for rows in row_ids(session, 5)]
    losses = plain_loop.train(model, getattr(plain_loop, method), steps, lr=1e-3, max_norm=1.0)
    # Of the slope in a margin, beta / 2, a twentieth of its error is left.
    found = [metrics["loss"] for _, metrics in recorded.steps]
    assert found == pytest.approx(losses, rel=1e-5, abs=NATS / 20)
    weights = dict(model.named_parameters())
    for name, tensor in session.engine.weights().items():
        assert (tensor - weights[name].detach()).abs().max() <= apart(5 * 1e-3), name
    moved = weights["model.norm.weight"].detach() - 1
    assert moved.abs().max() > EPSILON  # the first step alone is 1e-3 |g| / (|g| + EPSILON)


@pytest.mark.parametrize("kind", ["dpo", "kto", "kto-classes"])
def test_the_first_step_has_the_loss_of_an_unmoved_policy_and_rewards_of_0(alone, kind):
    metrics = alone[0][f"{kind}/whole/zero0"]["steps"][0]
    loss = math.log(2) if kind == "dpo" else 0.5  # -LS(0), and 1 - S(0)
    assert metrics["loss"] == pytest.approx(loss, abs=NATS)
    others = ("rewards/margins",) if kind == "dpo" else ("kl/raw", "kl/clamped")
    for name in ("rewards/chosen", "rewards/rejected", *others):
        assert metrics[name] == pytest.approx(0, abs=NATS), name
