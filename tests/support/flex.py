"""Trees for FlexAttention, whose blocks are longer than those of other tests."""

import numpy as np

from align.schemas.rows import Tree
from support.families import draw


def drawn_trees(seed, *, tokens, longest=200):
    """Trees with prompts and branches of 1 to `longest` tokens, up to so many tokens together."""
    random, trees = np.random.default_rng(seed), []
    while True:
        prompt, *branches = random.integers(1, longest + 1, random.integers(2, 5))
        if trees and sum(tree.num_tokens for tree in trees) + prompt + sum(branches) > tokens:
            return trees
        trees.append(Tree(draw(random, prompt), tuple(draw(random, size) for size in branches)))
