"""What autograd keeps of a forward pass if the cheap part is computed again; its gradient."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from align.stages.model.logprobs import branch_logps
from align.stages.model.memory.cheap_again import cheap_computed_again
from align.stages.model.policy import Policy
from support.families import PLAIN_FAMILIES, TREE_FAMILIES, mixed_trees, tiny_model

pytestmark = pytest.mark.numeric
WIDE = {"hidden_size": 64, "intermediate_size": 192}


def kept_and_gradient(policy, hooks):
    """Bytes that autograd keeps beside the weights, and the gradient of every weight."""
    weights = {one.untyped_storage()._cdata for one in policy.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    policy.zero_grad()
    torch.manual_seed(0)  # some families draw dropout
    batch = policy.path.batch(policy.path.rows(mixed_trees()), policy.device)
    with hooks(keep):
        logps = branch_logps(policy.model, batch, policy.path)
    size = sum(kept.values())
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return size, [one.grad.clone() for one in policy.parameters() if one.grad is not None]


def both_ways(model_type, settings):
    policy = Policy(tiny_model(model_type, settings))
    size, gradient = kept_and_gradient(policy, lambda keep: saved_tensors_hooks(keep, lambda t: t))
    less, same = kept_and_gradient(policy, cheap_computed_again)
    assert len(same) == len(gradient) > 0
    assert all(map(torch.equal, same, gradient))
    return less / size


@pytest.mark.parametrize("family", [*TREE_FAMILIES, *PLAIN_FAMILIES])
def test_every_family_has_the_same_gradient_to_the_last_bit_and_keeps_no_more(family):
    assert both_ways(*(TREE_FAMILIES | PLAIN_FAMILIES)[family]) <= 1


def test_a_llama_keeps_little_more_than_half(monkeypatch):
    # DeepSpeed's own, which a test of ZeRO-3 leaves behind in this process, keeps its inputs.
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    assert both_ways("llama", WIDE) < 0.6
