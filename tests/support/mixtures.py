"""Tiny mixtures of experts, and what their routers do, one branch at a time."""

import numpy as np
import torch

from support.families import TREE_FAMILIES

NAMES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe")
MIXTURES = {name: TREE_FAMILIES[name] for name in NAMES}  # of 4 experts, 2 for each token


def oracle(model, trees):
    """By the model's own router logits; the prompt of a tree is taken from its first branch."""
    parts = [part for tree in trees for part in _logits_of(model, tree)]
    return torch.stack([_sums(torch.cat(layer)) for layer in zip(*parts, strict=True)])


def _logits_of(model, tree):
    """Of each branch, a tensor for each layer."""
    for number, branch in enumerate(tree.branches):
        tokens = torch.from_numpy(np.concatenate([tree.prompt, branch]).astype(np.int64))
        logits = model(input_ids=tokens[None], output_router_logits=True).router_logits
        yield [layer[len(tree.prompt) if number else 0 :] for layer in logits]


def _sums(logits, chosen=2):
    experts = logits.shape[1]
    shares = torch.exp(logits.double() - logits.double().logsumexp(1, keepdim=True))
    entropy = -(shares * shares.log()).sum()
    best = shares.argsort(dim=1, descending=True)[:, :chosen]
    counts = torch.tensor([(best == expert).sum() for expert in range(experts)])
    count = torch.tensor([len(logits)], dtype=torch.float64)
    return torch.cat([counts.double(), shares.sum(0), entropy[None], count])
