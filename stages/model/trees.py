"""Lays trees out as one padded batch: `[prompt | branch 1 | branch 2 | ...]` per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...schemas.rows import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

PAD = -1


@dataclass(frozen=True)
class TreeBatch:
    """Trees of one batch; T completion tokens in the order tree, branch, token.

    Padded: a row per tree. Packed: one row with all trees end to end.
    """

    token_ids: Tensor  # (rows, length) int64
    positions: Tensor  # (rows, length) int64, restarting at the end of the prompt
    segments: Tensor  # (rows, length) int64: 0 the prompt, 1.. the branches, -1 padding
    predictors: Tensor  # (T,) int64, index of the state that predicts it in (rows * length)
    targets: Tensor  # (T,) int64
    edges: tuple[tuple[int, ...], ...]  # per tree, in (rows * length): start, fork, branch ends


def tree_batch(trees: Sequence[Tree], device: torch.device, *, packed: bool = False) -> TreeBatch:
    """Lays the trees out, each padded on the right to the longest unless packed."""
    sizes = [tree.num_tokens for tree in trees]
    shape = (1, sum(sizes)) if packed else (len(trees), max(sizes))
    starts = np.cumsum([0, *sizes[:-1]]) if packed else np.arange(len(trees)) * shape[1]
    grids = np.zeros((3, *shape), np.int64)
    grids[2] = PAD
    places = [_place(tree) for tree in trees]
    for start, place in zip(starts, places, strict=True):
        grids.reshape(3, -1)[:, start : start + place.edges[-1]] = place.columns
    predictors = [start + place.predictors for start, place in zip(starts, places, strict=True)]
    targets = [branch for tree in trees for branch in tree.branches]
    token_ids, positions, segments = torch.from_numpy(grids).to(device)
    return TreeBatch(
        token_ids=token_ids,
        positions=positions,
        segments=segments,
        predictors=torch.from_numpy(np.concatenate(predictors)).to(device),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
        edges=tuple(
            (int(start), *(int(start + edge) for edge in place.edges))
            for start, place in zip(starts, places, strict=True)
        ),
    )


@dataclass(frozen=True)
class _Place:
    """One tree, counted from its own first token."""

    columns: np.ndarray  # (3, tokens): token ids, positions, segments
    predictors: np.ndarray  # (completion tokens,)
    edges: list[int]  # where the prompt and each branch end


def _place(tree: Tree) -> _Place:
    assert len(tree.prompt) > 0, "a prompt has a token"
    lengths = [len(branch) for branch in tree.branches]
    fork, *stops = edges = np.cumsum([len(tree.prompt), *lengths])
    after = np.arange(fork, stops[-1])
    begins = np.repeat(edges[:-1], lengths)
    token_ids = np.concatenate([tree.prompt, *tree.branches])
    positions = np.concatenate([np.arange(fork), after - begins + fork])
    segments = np.repeat(np.arange(len(edges)), [fork, *lengths])
    # The last token of the prompt predicts the first of each branch.
    predictors = np.where(after == begins, fork, after) - 1
    return _Place(np.stack([token_ids, positions, segments]), predictors, edges.tolist())


def single_branches(trees: Sequence[Tree]) -> list[Tree]:
    """The same branches in the same order, each with its own copy of the prompt."""
    return [Tree(tree.prompt, (branch,)) for tree in trees for branch in tree.branches]


def groups_within(
    trees: Sequence[Tree], max_tokens: int, *, packed: bool = False
) -> Iterator[list[Tree]]:
    """Consecutive groups of at most `max_tokens` tokens; a longer tree goes alone."""
    group: list[Tree] = []
    total = longest = 0
    for tree in trees:
        total, longest = total + tree.num_tokens, max(longest, tree.num_tokens)
        if group and (total if packed else longest * (len(group) + 1)) > max_tokens:
            yield group
            group, total, longest = [], tree.num_tokens, tree.num_tokens
        group.append(tree)
    if group:
        yield group


def padded_length(trees: Sequence[Tree]) -> int:
    """Tokens in the longest tree."""
    return max(tree.num_tokens for tree in trees)
