"""What autograd keeps of a forward pass if the cheap part is computed again; its gradient."""

from contextlib import nullcontext

import pytest
import torch

from align.stages.model.cheap_again import cheap_computed_again
from align.stages.model.fused_head import BUFFER_BYTES
from align.stages.model.logprobs import branch_logps
from align.stages.model.policy import Policy
from support.families import (
    HYBRID_FAMILIES,
    PLAIN_FAMILIES,
    TREE_FAMILIES,
    mixed_trees,
    tiny_model,
)
from support.live_bytes import LiveBytes

pytestmark = pytest.mark.numeric
WIDE = {"hidden_size": 64, "intermediate_size": 192}


def kept_and_gradient(policy, hooks):
    """Bytes that a forward pass leaves beside the head's buffer; the gradient of every weight."""
    policy.zero_grad()
    torch.manual_seed(0)  # some families draw dropout
    batch = policy.path.batch(policy.path.rows(mixed_trees()), policy.device)
    with LiveBytes([*policy.parameters(), *policy.buffers()]) as live, hooks():
        logps = branch_logps(policy.model, batch, policy.path)
    size = live.now - BUFFER_BYTES
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return size, [one.grad.clone() for one in policy.parameters() if one.grad is not None]


def both_ways(model_type, settings):
    policy = Policy(tiny_model(model_type, settings))
    size, gradient = kept_and_gradient(policy, nullcontext)
    less, same = kept_and_gradient(policy, cheap_computed_again)
    assert len(same) == len(gradient) > 0
    assert all(map(torch.equal, same, gradient))
    return less / size


# Dropout of its own, soft caps, windows, sinks, experts, no attention, and mixers in rows.
MOST_UNLIKE = ("llama", "gpt2", "gemma2", "gpt_oss", "qwen3_moe", "bloom", "mamba", "qwen3_next")
FAMILIES = TREE_FAMILIES | PLAIN_FAMILIES | HYBRID_FAMILIES


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in MOST_UNLIKE else pytest.mark.long)
        for name in FAMILIES
    ],
)
def test_every_family_has_the_same_gradient_to_the_last_bit_and_keeps_no_more(name):
    assert both_ways(*FAMILIES[name]) <= 1


def test_a_llama_keeps_little_more_than_half(monkeypatch):
    # DeepSpeed's own, which a test of ZeRO-3 leaves behind in this process, keeps its inputs.
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    assert both_ways("llama", WIDE) < 0.6


def gradient_of(pass_of, hooks):
    """The gradient of three matrices under `pass_of`."""
    torch.manual_seed(0)
    a, b, c = (torch.randn(8, 8, requires_grad=True) for _ in range(3))
    with hooks():
        out = pass_of(a, b, c)
    out.sum().backward()
    return [one.grad for one in (a, b, c) if one.grad is not None]


def product_clamped(a, b, c):
    x = a * b
    with torch.no_grad():
        x.clamp_(-1, 1)
    return x @ c


def activation_masked(a, b, c):
    x = torch.nn.functional.silu(a @ b)
    with torch.no_grad():
        x[:, -1].zero_()
    return x @ c


def used_and_then_changed(a, b, c):
    x = a * b
    y = x @ c
    with torch.no_grad():
        x.zero_()
    return y


@pytest.mark.parametrize("pass_of", [product_clamped, activation_masked])
def test_what_is_changed_in_place_has_its_gradient_as_it_was_used(pass_of):
    expected, found = (gradient_of(pass_of, one) for one in (nullcontext, cheap_computed_again))
    assert all(map(torch.equal, found, expected))


def test_what_is_dropped_may_change_and_what_is_kept_may_not():
    found = gradient_of(used_and_then_changed, cheap_computed_again)
    expected = gradient_of(lambda a, b, c: (a * b) @ c, nullcontext)
    assert all(map(torch.equal, found, expected))

    def input_of_an_activation_changed(a, b, c):
        h = a @ b
        y = torch.nn.functional.silu(h) @ c
        h.add_(1)
        return y

    for hooks in (nullcontext, cheap_computed_again):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient_of(input_of_an_activation_changed, hooks)
