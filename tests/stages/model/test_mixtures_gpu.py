"""Mixtures of experts on a GPU beside the CPU: what their routers do, and its gradient."""

import pytest
import torch
import transformers

from align.stages.model.policy import Policy, turn_dropout_off
from align.stages.train.router_balance import router_share
from support.families import mixed_trees, tiny_model
from support.mixtures import MIXTURES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # the compiler has advice for other programs
]

WIDE = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "initializer_range": 0.1}
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.4}  # of the sums' and the gradient's own length


def outcome(name, device, dtype):
    kind, settings = MIXTURES[name]
    model = tiny_model(kind, settings | WIDE).to(device, dtype)
    turn_dropout_off(model)
    policy = Policy(model, balanced=True)
    if kind == "granitemoe" and not policy.routers:
        pytest.skip(f"transformers {transformers.__version__} records no router of {kind}")
    logps, routing = policy(mixed_trees())
    (logps.double().sum() / 100 + router_share(routing, routing.detach())).backward()
    gradients = [one.grad.flatten() for one in policy.parameters() if one.grad is not None]
    return [one.detach().double().cpu() for one in (logps, routing, torch.cat(gradients))]


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_gpu_routes_and_learns_as_the_cpu_does(device, name, dtype):
    expected = outcome(name, "cpu", torch.float32)
    for found, wanted in zip(outcome(name, device, dtype), expected, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < ALLOWED[dtype]
