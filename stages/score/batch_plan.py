"""Plans trees that share prompts, and batches of trees of similar length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class TreePlan:
    """Completions that are scored after one copy of their prompt."""

    row: int  # a row that holds the prompt
    branches: tuple[int, ...]
    length: int  # tokens of prompt and branches


@dataclass(frozen=True)
class TreeCost:
    """The cost of a sequence: linear in its tokens for the layers, quadratic for attention."""

    hidden_size: int
    tokens_per_batch: int

    def __call__(self, length: int) -> float:
        """The cost of one sequence; 1 is one token's pass through the layers."""
        # A layer costs about 24 h^2 flops a token; attention over L tokens 4 h L.
        return length * (1.0 + length / (6.0 * self.hidden_size))


def plan_trees(
    groups: Iterable[Sequence[int]],
    row_of_completion: NDArray[np.int64],
    *,
    prompt_lengths: NDArray[np.int64],
    completion_lengths: NDArray[np.int64],
    cost: TreeCost,
) -> list[TreePlan]:
    """Trees of completions of one prompt, joined as long as sharing the prompt is cheaper.

    Each group lists the completions of one prompt that must be scored.
    """
    trees: list[TreePlan] = []
    for branches in groups:
        row = int(row_of_completion[branches[0]])
        length = prompt = int(prompt_lengths[row])
        current: list[int] = []
        for branch in branches:
            more = int(completion_lengths[branch])
            together = cost(length + more)
            apart = cost(length) + cost(prompt + more)
            fits = length + more <= cost.tokens_per_batch and together <= apart
            if current and not fits:
                trees.append(TreePlan(row, tuple(current), length))
                current, length = [], prompt
            current.append(branch)
            length += more
        trees.append(TreePlan(row, tuple(current), length))
    return trees


def plan_batches(lengths: Sequence[int], tokens_per_batch: int, *, pads: bool) -> list[list[int]]:
    """Batches of sequences of similar length within a budget, padding included; longest first."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    left = 0  # tokens of the budget of the last batch
    for index in order:
        first = batches[-1][0] if pads and batches else index
        if not batches or lengths[first] > left:
            batches.append([])
            first, left = index, tokens_per_batch
        batches[-1].append(index)
        left -= lengths[first]
    return batches
