"""The whole of stage 2 beside sixty lines that hold both models and run one row at a time."""

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


@pytest.mark.parametrize(
    ("cache", "method"), [("pairs", "dpo"), ("pairs", "kto"), ("labels", "kto"), ("pairs", "orpo")]
)
def test_training_ends_in_the_weights_of_a_plain_loop(training_world, one_rank, cache, method):
    folder = getattr(training_world, cache)
    session, recorded = learn(job_of(folder, method, **LEARNING), one_rank)
    stored = plain_loop.rows_of(folder)
    with session.feed.steps(START.cursor) as batches:
        # Alone and with a large budget a step is one micro-batch.
        steps = [[stored[row] for row in next(batches).own[0].row_ids] for _ in range(5)]
    model = AutoModelForCausalLM.from_pretrained(training_world.model, dtype=torch.float32)
    losses = plain_loop.train(model, getattr(plain_loop, method), steps, lr=1e-3, max_norm=1.0)
    # Of the slope in a margin, beta / 2, a twentieth of its error is left.
    found = [metrics["loss"] for _, metrics in recorded.steps]
    assert found == pytest.approx(losses, rel=1e-5, abs=NATS / 20)
    weights = dict(model.named_parameters())
    for name, tensor in session.engine.weights().items():
        assert (tensor - weights[name].detach()).abs().max() <= apart(5 * 1e-3), name
    moved = weights["model.norm.weight"].detach() - 1
    assert moved.abs().max() > EPSILON  # the first step alone is 1e-3 |g| / (|g| + EPSILON)
