"""The score of every branch of a batch: a scalar head on the state of its last token."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...schemas.errors import UsageError
from .logps import ScoringPath, causal_model, input_device, last_states
from .probe import PATHS, TOLERANCE, announced, probe_trees, reason, those_of
from .trees import single_branches, tree_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ...schemas.rows import Tree
    from .trees import TreeBatch

LAYOUTS = tuple(replace(path, head="score") for path in PATHS if path.head == "fused")


def tree_scores(model: nn.Module, trees: Sequence[Tree], path: ScoringPath) -> Tensor:
    """Scores in the order tree, branch, by one pass of the model: (branches,) float32."""
    rows = single_branches(trees) if path.layout == "plain" else trees
    inner: Any = causal_model(model)
    batch = tree_batch(rows, input_device(model), packed=path.layout == "packed")
    places = _last_places(rows, batch, inner.config.pad_token_id)
    states = last_states(inner, batch, path)
    scores: Tensor = inner.score(states[torch.from_numpy(places).to(states.device)])
    return scores.squeeze(1)


def choose_layout(model: nn.Module) -> ScoringPath:
    """The fastest way to lay trees out that agrees with the model's own scores of seeded rows."""
    inner: Any = causal_model(model)
    trees = probe_trees(inner.config)
    expected = torch.cat([_own_score(inner, tree) for tree in single_branches(trees)])
    allowed = TOLERANCE[inner.dtype] * max(1.0, float(expected.abs().max()))
    refused: list[str] = []
    for path in those_of(LAYOUTS, model):
        difference = _difference(model, trees, expected, path)
        if isinstance(difference, float) and difference <= allowed:
            return announced(replace(path, worst_difference=difference), refused)
        refused.append(f"{path.layout} rows: {reason(difference)}")
    raise UsageError(
        f"{type(inner).__name__} scores otherwise than by its last hidden states "
        f"({'; '.join(refused)}). Use another model for rewards."
    )


def _last_places(trees: Sequence[Tree], batch: TreeBatch, pad: int) -> np.ndarray:
    """Where each branch is scored, in (rows * length).

    That is its last token that is not the padding token, because transformers finds a text's end
    so: where a tokenizer pads with its EOS, a score is that of the token before it.
    """
    places = []
    for tree, (start, fork, *stops) in zip(trees, batch.edges, strict=True):
        for branch, (begin, _) in zip(tree.branches, pairwise((fork, *stops)), strict=True):
            if (kept := np.flatnonzero(branch != pad)).size:
                places.append(begin + kept[-1])
            else:
                before = np.flatnonzero(tree.prompt != pad)
                places.append(start + (before[-1] if before.size else 0))
    return np.array(places, np.int64)


def _own_score(model: Any, tree: Tree) -> Tensor:
    """The definition: what others get who load the model."""
    tokens = np.concatenate([tree.prompt, *tree.branches]).astype(np.int64)
    token_ids = torch.from_numpy(tokens)[None].to(input_device(model))
    scores: Tensor = model(input_ids=token_ids).logits[:, 0]
    return scores.float()


def _difference(
    model: nn.Module, trees: list[Tree], expected: Tensor, path: ScoringPath
) -> float | Exception:
    """The worst branch's distance from the definition, or why it cannot be had."""
    try:
        scores = tree_scores(model, trees, path)
    except Exception as error:  # model code refuses a mask in any way it likes
        return error
    return float((scores - expected).abs().max())
