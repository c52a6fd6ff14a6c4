"""A policy so small that a second is enough to shard, save and compare it dozens of times."""

import torch
from torch import nn

from align.schemas.rows import Tree

VOCABULARY, WIDTH = 23, 8


class TinyPolicy(nn.Module):
    """Predicts a token from the one before it; the head is the embedding."""

    output_names = ("logps",)

    def __init__(self, *, dropout=0.0, frozen=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(5)
        self.model = nn.Module()
        self.model.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.model.hidden = nn.Linear(WIDTH, WIDTH)
        self.model.head = nn.Linear(WIDTH, VOCABULARY)
        self.model.head.weight = self.model.embed.weight
        self.model.register_buffer("scale", torch.tensor([0.5]))
        self.dropout = nn.Dropout(dropout)
        if frozen:
            self.model.embed.requires_grad_(False)
        self.to(dtype)

    def forward(self, trees):
        tokens, targets = [0], [0]
        for tree in trees:
            for branch in tree.branches:
                tokens += [int(tree.prompt[-1]), *map(int, branch[:-1])]
                targets += map(int, branch)
        at = self.model.scale.device
        states = torch.tanh(self.model.hidden(self.model.embed(torch.tensor(tokens, device=at))))
        logits = self.model.head(self.dropout(states * self.model.scale)).float()
        logps = torch.log_softmax(logits, -1)
        return logps.gather(1, torch.tensor(targets, device=at)[:, None])[None, 1:, 0]


def some_trees(generator, count):
    """Trees with one or two branches of one to six tokens each."""
    trees = []
    for _ in range(count):
        prompt = generator.integers(0, VOCABULARY, 3, "int32")
        sizes = generator.integers(1, 7, generator.integers(1, 3))
        branches = tuple(generator.integers(0, VOCABULARY, size, "int32") for size in sizes)
        trees.append(Tree(prompt, branches))
    return trees
