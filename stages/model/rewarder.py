"""A reward model in the place of the reference: its score of a branch, where that one ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from transformers import AutoModelForSequenceClassification

from ...schemas.errors import UsageError
from .fingerprint import model_config
from .reference import HfReference, TreeScorer
from .reward_model import load_reward_model
from .scalar import SCORES
from .scores import choose_layout, tree_scores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from ...schemas.rows import Tree
    from .logps import ScoringPath

SCORE_VERSION = "score-1 float32"


class HfReward(HfReference):
    """A Hugging Face folder of a sequence-classification model with one label."""

    _kind = AutoModelForSequenceClassification

    def identity(self) -> Mapping[str, str]:
        """As of a reference, but that other numbers come out of it."""
        architectures = model_config(self.options.path).get("architectures") or [""]
        if not str(architectures[0]).endswith(SCORES):
            raise UsageError(
                f"{self.options.path} is no reward model: its config.json names "
                f"{architectures[0] or 'no architecture'}. Train one by `align train --method "
                "reward`, or name a sequence-classification model."
            )
        return {**super().identity(), "numerics.head": SCORE_VERSION}

    def open(self) -> RewardScorer:
        """Loads the weights and chooses how to score with them."""
        files = self._files
        model = load_reward_model(self.options, seed=0).eval().requires_grad_(False)
        scorer = RewardScorer(model, files)
        files.require_unchanged()
        return scorer


class RewardScorer(TreeScorer):
    """Scores trees with a loaded reward model."""

    def _choose(self, model: nn.Module) -> ScoringPath:
        return choose_layout(model)

    def _numbers(self, trees: Sequence[Tree]) -> torch.Tensor:
        """Nothing until the last token of a branch, and there its score: (T,) float32."""
        scores = tree_scores(self.model, trees, self.path)
        lengths = [len(branch) for tree in trees for branch in tree.branches]
        numbers = scores.new_zeros(sum(lengths))
        numbers[np.cumsum(lengths) - 1] = scores
        return numbers
