"""A mixture whose experts are modules of their own, as code from outside transformers has them."""

import numpy as np
import torch
from torch import nn

from align.stages.engine.deepspeed_engine import open_engine
from support.tiny_policy import VOCABULARY, WIDTH, some_trees


class Block(nn.Module):
    """Each token goes through one of four experts; one without a token is not called."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, states):
        shares, chosen = torch.softmax(self.gate(states), -1).max(-1)
        outputs = states
        for expert in chosen.unique().tolist():
            at = (chosen == expert).nonzero()[:, 0]
            changed = self.experts[expert](states[at]) * shares[at, None]
            outputs = outputs.index_add(0, at, changed)
        return outputs


class ListedExperts(nn.Module):
    """Two such blocks between an embedding and a head."""

    output_names = ("logps",)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY)
        )

    def forward(self, trees):
        tokens = [token for tree in trees for branch in tree.branches for token in branch]
        targets = torch.tensor(tokens, dtype=torch.int64)
        logps = torch.log_softmax(self.model(targets), -1)
        return logps.gather(1, targets[:, None])[None, :, 0]


def train_listed(world, options):
    """Three steps, each rank with rows of its own; and which experts this rank called."""
    policy, called = ListedExperts(), set()
    for number, expert in enumerate([*policy.model[1].experts, *policy.model[2].experts]):
        expert.register_forward_hook(lambda *_, number=number: called.add(number))
    engine, _ = open_engine(policy, options, world, hidden_size=WIDTH)
    updates, missed = [], []
    for step in range(3):
        called.clear()
        trees = some_trees(np.random.default_rng(10 * step), 4)[world.rank :: world.size]
        engine.set_lr(0.01)
        engine.learn_mode(dropout_seed=1)
        engine.backward(-engine.forward(trees)["logps"].double().sum() / 30, is_last=True)
        updates.append(engine.step().grad_norm)
        missed.append(sorted(set(range(8)) - called))
    weights = {name: tensor.flatten().tolist() for name, tensor in engine.weights().items()}
    return {"updates": updates, "missed": missed, "weights": weights}
