"""Whether the policy, before its first step, gives the log-probs the cache was made with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ...schemas.errors import FingerprintError
from ...schemas.rows import Tree, allowed_gaps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...schemas.batches import Engine
    from ...schemas.rows import ScoredBlock


def largest_gap(engine: Engine, sample: Iterable[tuple[str, ScoredBlock]], *dtypes: str) -> float:
    """Scores rows of a cache again; numbers other than the cache's are refused.

    Every rank scores the same rows: a policy spread over ranks needs all of them for each.
    """
    engine.learn_mode(dropout_seed=None)
    worst = 0.0
    for name, block in sample:
        logps, lengths = _scored(engine, block), block.rows.completions.lengths
        gaps = np.abs(logps - block.logps)
        excess = gaps - allowed_gaps(lengths, *dtypes)
        if not (excess <= 0).all():
            raise _refusal(name, block, logps, int(np.argmax(excess)))
        worst = max(worst, float(gaps.max()))
    return worst


@torch.no_grad()
def _scored(engine: Engine, block: ScoredBlock) -> np.ndarray:
    rows = block.rows
    sums = []
    for row in range(len(rows)):
        branches = range(rows.branch_offsets[row], rows.branch_offsets[row + 1])
        tree = Tree(rows.prompts[row], tuple(rows.completions[branch] for branch in branches))
        tokens = torch.split(engine.answers((tree,))["logps"], [len(one) for one in tree.branches])
        sums += [float(logps.double().sum()) for logps in tokens]
    return np.array(sums)


def _refusal(name: str, block: ScoredBlock, logps: np.ndarray, at: int) -> FingerprintError:
    row = block.rows.row[block.rows.row_of_branch[at]]
    return FingerprintError(
        f"{name}: the policy is the reference of this cache, yet it scores a branch of input row "
        f"{row} as {logps[at]:.6f}, and the cache has {block.logps[at]:.6f}. `align verify` tells "
        "whether the cache is sound. If it is, this machine computes otherwise than the one it "
        "was made on: make it anew here, or with --dtype float32."
    )
