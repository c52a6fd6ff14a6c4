"""Reward models: a language model's layers under a head that scores a branch's last token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ...schemas.config import ModelOptions
from ...schemas.errors import UsageError
from ...schemas.rows import Tree
from .copies import on_device
from .layouts.tree_attention import TreeBatch, single_branches
from .loading.adapters import merged
from .loading.heads import SCORES, ScalarHead
from .loading.library_errors import in_short
from .loading.load import load_model
from .loading.model_folder import model_config
from .loading.quiet import quiet
from .logprobs import ScoringPath, causal_model, input_device, last_states
from .path_search import (
    ANY_PATH,
    PATHS,
    TOLERANCE,
    Agree,
    PathOptions,
    announced,
    fastest,
    probe_trees,
)
from .reference import HfReference, TreeScorer

_ONE_LABEL = {"id2label": {0: "score"}, "label2id": {"score": 0}}


def load_reward_model(
    options: ModelOptions, seed: int, load: Callable[..., nn.Module] = load_model
) -> nn.Module:
    """The folder's reward model if it is one; else its layers under a randomly drawn head."""
    if _architecture(options.path).endswith(SCORES):
        model: Any = load(options, AutoModelForSequenceClassification)
    else:
        model = _with_new_head(options, seed, load)
    _head_of(model, options.path).__class__ = ScalarHead
    of_text = model.config.get_text_config(decoder=True)
    of_text.pad_token_id = _padding_token(options.path, of_text)
    scorer: nn.Module = model
    return scorer


def _architecture(folder: str) -> str:
    """The class that a folder's config.json names; "" if none."""
    return str((model_config(folder).get("architectures") or [""])[0])


def _with_new_head(options: ModelOptions, seed: int, load: Callable[..., nn.Module]) -> Any:
    """A reward model on the layers of a causal model, into which an adapter is merged."""
    causal: Any = merged(load(options))
    config, labelled = causal.config, deepcopy(causal.config)
    labelled.num_labels = 1
    build: Any = AutoModelForSequenceClassification.from_config
    try:
        with quiet(), torch.device("meta"):  # to be filled with the layers that are loaded
            model = build(labelled, trust_remote_code=False)
    except (ValueError, ImportError) as error:
        raise UsageError(
            f"{options.path}: transformers has no class of this architecture that scores texts "
            f"({in_short(error)}). Use a model of another one."
        ) from error
    if type(model.base_model) is not type(causal.base_model):
        raise UsageError(
            f"{options.path}: {type(model).__name__} is built on other layers than "
            f"{type(causal).__name__}. Use a model of text alone."
        )
    for name, value in _ONE_LABEL.items():
        setattr(config, name, value)
    # One config for all of it: layers look their attention up in theirs.
    model.config = config
    setattr(model, model.base_model_prefix, causal.base_model)
    # transformers saves the layers under the names that they were loaded from.
    model._weight_conversions = getattr(causal, "_weight_conversions", None)
    head = _head_of(model, options.path).to(causal.dtype)
    head.to_empty(device=causal.get_input_embeddings().weight.device)
    of_text = config.get_text_config(decoder=True)
    _draw(head, getattr(of_text, "initializer_range", None), seed)
    return model


def _head_of(model: Any, folder: str) -> nn.Linear:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UsageError(
            f"{folder}: {type(model).__name__} does not end in one score. Use a causal model, or "
            "one that was trained with num_labels=1."
        )
    return head


def _draw(head: nn.Linear, spread: float | None, seed: int) -> None:
    """Draws the head as transformers does, but the same on every rank and device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(head.weight.shape, generator=generator)
    with torch.no_grad():
        head.weight.copy_(drawn * (spread or 1 / math.sqrt(head.in_features)))
        if head.bias is not None:
            head.bias.zero_()


def _padding_token(folder: str, config: Any) -> int:
    """The padding token of a saved reward model: the tokenizer's, the config's, or else EOS."""
    try:
        with quiet():
            own = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            ).pad_token_id
    except (OSError, ValueError, KeyError, TypeError):
        own = None
    eos, padding = (getattr(config, name, None) for name in ("eos_token_id", "pad_token_id"))
    first_eos = eos[0] if isinstance(eos, list) and eos else eos
    for token in (own, padding, first_eos):
        if isinstance(token, int) and token >= 0:
            return token
    raise UsageError(
        f"{folder}: neither the tokenizer nor the config names a padding token or an EOS, and "
        "transformers cannot tell where a text in a batch ends. Set pad_token_id in config.json."
    )


SCORE_VERSION = "score-1 float32"


class HfReward(HfReference):
    """A Hugging Face folder of a sequence-classification model with one label."""

    _kind = AutoModelForSequenceClassification

    def identity(self) -> Mapping[str, str]:
        """The identity of a reference, with the version of scores instead of the head's."""
        if not (kind := _architecture(self.options.path)).endswith(SCORES):
            raise UsageError(
                f"{self.options.path} is not a reward model: its config.json names "
                f"{kind or 'no architecture'}. Train one by `align train --method "
                "reward`, or name a sequence-classification model."
            )
        return {**super().identity(), "numerics.head": SCORE_VERSION}

    def open(self) -> RewardScorer:
        """A scorer with the weights loaded, on the layout that the probe chose."""
        return RewardScorer(self.load(), self._files, PathOptions.of(self.options))

    def _loaded(self) -> nn.Module:
        return load_reward_model(self.options, seed=0).eval().requires_grad_(False)


class RewardScorer(TreeScorer):
    """Scores trees with a loaded reward model."""

    def _choose(self, model: nn.Module) -> ScoringPath:
        return choose_layout(model, options=self.options)

    def _numbers(self, trees: Sequence[Tree]) -> torch.Tensor:
        """The score of each branch at its last token, and zeros before: (T,) float32."""
        scores = tree_scores(self.model, trees, self.path)
        lengths = [len(branch) for tree in trees for branch in tree.branches]
        numbers = scores.new_zeros(sum(lengths))
        numbers[np.cumsum(lengths) - 1] = scores
        return numbers


LAYOUTS = tuple(replace(path, head="score") for path in PATHS if path.head == "fused")


def tree_scores(model: nn.Module, trees: Sequence[Tree], path: ScoringPath) -> Tensor:
    """Scores in the order tree, branch, by one pass of the model: (branches,) float32."""
    rows = path.rows(trees)
    return batch_scores(model, rows, path.batch(rows, input_device(model)), path)


def batch_scores(
    model: nn.Module, rows: Sequence[Tree], batch: TreeBatch, path: ScoringPath
) -> Tensor:
    """Scores of rows that are laid out, in the order row, branch: (branches,) float32."""
    inner: Any = causal_model(model)
    of_text = inner.config.get_text_config(decoder=True)
    positions = _last_positions(rows, batch, of_text.pad_token_id)
    states = last_states(inner, batch, path)
    scores: Tensor = inner.score(states[on_device(positions, states.device)])
    return scores.squeeze(1)


def choose_layout(
    model: nn.Module, agree: Agree = bool, options: PathOptions = ANY_PATH
) -> ScoringPath:
    """The fastest layout of trees that agrees with the model's own scores of seeded rows."""
    inner: Any = causal_model(model)
    trees = probe_trees(inner.config)
    expected = torch.cat([_own_score(inner, tree) for tree in single_branches(trees)])

    def difference(path: ScoringPath) -> float:
        return float((tree_scores(model, trees, path) - expected).abs().max())

    allowed = TOLERANCE[inner.dtype] * max(1.0, float(expected.abs().max()))
    found, refused = fastest(model, LAYOUTS, difference, allowed, options, agree)
    if found:
        return announced(model, found, refused)
    raise UsageError(
        f"{type(inner).__name__} does not score by its last hidden states "
        f"({'; '.join(refused)}). Use another model for rewards."
    )


def _last_positions(trees: Sequence[Tree], batch: TreeBatch, pad: int) -> np.ndarray:
    """Positions at which the branches are scored, in (rows * length).

    Each is the last token that is not the padding token, because transformers finds a text's end
    so: where a tokenizer pads with its EOS, the token before it is scored.
    """
    positions = []
    for tree, (start, fork, *stops) in zip(trees, batch.edges, strict=True):
        for branch, (begin, _) in zip(tree.branches, pairwise((fork, *stops)), strict=True):
            if (kept := np.flatnonzero(branch != pad)).size:
                positions.append(begin + kept[-1])
            else:
                before = np.flatnonzero(tree.prompt != pad)
                positions.append(start + (before[-1] if before.size else 0))
    return np.array(positions, np.int64)


def _own_score(model: Any, tree: Tree) -> Tensor:
    """The definition: the score that transformers computes for a row of one branch."""
    tokens = np.concatenate([tree.prompt, *tree.branches]).astype(np.int64)
    token_ids = torch.from_numpy(tokens)[None].to(input_device(model))
    scores: Tensor = model(input_ids=token_ids).logits[:, 0]
    return scores.float()
