"""FlexAttention where there is no GPU: its uncompiled form, and how long trees are drawn."""

import numpy as np
import pytest
from torch.nn.attention import flex_attention as torchs

from align.schemas.rows import Tree
from support.families import draw


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """Lets the uncompiled function have a gradient on a CPU, which torch refuses it there."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def drawn_trees(seed, *, tokens, longest=200):
    """Trees with prompts and branches of 1 to `longest` tokens, up to so many tokens together."""
    random, trees = np.random.default_rng(seed), []
    while True:
        prompt, *branches = random.integers(1, longest + 1, random.integers(2, 5))
        if trees and sum(tree.num_tokens for tree in trees) + prompt + sum(branches) > tokens:
            return trees
        trees.append(Tree(draw(random, prompt), tuple(draw(random, size) for size in branches)))
