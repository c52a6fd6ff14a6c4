"""The policy's gradients beside those of the model's own logits, branch by branch."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from align.stages.model.policy import Policy, turn_dropout_off
from support.families import PLAIN_FAMILIES, TREE_FAMILIES, mixed_trees, tiny_model

pytestmark = pytest.mark.numeric

TREES = tuple(mixed_trees())
FAMILIES = {
    **TREE_FAMILIES,
    **PLAIN_FAMILIES,
    "llama with tied weights": ("llama", {"tie_word_embeddings": True}),
}
# Their experts multiply in single precision only.
SINGLE = {"gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
# It rounds its own logits' gradients as much.
ROUGH = {"gpt_neo with local layers": 3e-5}
SLOWER = {"packed": ("packed", "tree", "plain"), "tree": ("tree", "plain"), "plain": ("plain",)}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_has_the_gradient_of_the_models_own_logits(name):
    model = tiny_model(*FAMILIES[name])
    turn_dropout_off(model)
    slopes = torch.randn(
        sum(len(branch) for tree in TREES for branch in tree.branches),
        generator=torch.Generator().manual_seed(0),
    )
    expected = own_gradients(model, slopes, torch.float32 if name in SINGLE else torch.float64)
    policy = Policy(deepcopy(model))
    assert policy.path.head == "fused"
    for layout in SLOWER[policy.path.layout]:
        policy.path = replace(policy.path, layout=layout)
        policy.zero_grad()
        (policy(TREES)[0] * slopes).sum().backward()
        assert worst_parameter(policy.model, expected) < ROUGH.get(name, 1e-5), layout


def own_gradients(model, slopes, dtype):
    own, start = deepcopy(model).to(dtype).train(), 0
    for tree in TREES:
        for branch in tree.branches:
            tokens = torch.from_numpy(np.concatenate([tree.prompt, branch]).astype(np.int64))
            logits = own(input_ids=tokens[None], use_cache=False).logits[0]
            logps = torch.log_softmax(logits[len(tree.prompt) - 1 : -1], dim=-1)
            wanted = logps.gather(1, tokens[len(tree.prompt) :, None]).squeeze(1)
            (wanted * slopes[start : start + len(branch)]).sum().backward()
            start += len(branch)
    return {name: parameter.grad for name, parameter in own.named_parameters()}


def worst_parameter(model, expected):
    """The largest difference, as a share of the largest element of that parameter's gradient."""
    shares = []
    for name, found in model.named_parameters():
        largest, gap = expected[name].abs().max(), (found.grad - expected[name]).abs().max()
        # Some biases make no difference, so that their gradient is nothing but rounding.
        shares.append(float(gap / largest) if largest > 1e-10 else float(gap))
    return max(shares)
