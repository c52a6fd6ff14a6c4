"""Compares the fast ways to score a model with its own logits, and chooses the fastest true one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...schemas.rows import Tree
from .head import output_head
from .logps import ScoringPath, causal_model, input_device, tree_logps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

logger = logging.getLogger("align")

# Fastest first; the last is the definition the others are compared with.
PATHS = (
    ScoringPath("packed", "fused", 0.0),
    ScoringPath("tree", "fused", 0.0),
    ScoringPath("plain", "fused", 0.0),
    ScoringPath("tree", "exact", 0.0),
)
DEFINITION = ScoringPath("plain", "exact", 0.0)
# float32: nats per sequence. Half precision: mean nats per token, because the model's own logits
# are rounded there (bfloat16 steps by 1/16 at logits of 8 to 16, float16 by 1/128).
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
LONGEST_WINDOW = 512  # longer windows would make the probe itself expensive
PROBE_SHAPES = ((7, (5, 3, 9)), (1, (1, 4)), (12, (6, 1)), (3, (8,)))


def choose_path(model: nn.Module) -> ScoringPath:
    """The fastest way to score that agrees with `model(...).logits` on seeded rows."""
    trees = probe_trees(causal_model(model).config)
    expected = [_own_logps(model, tree) for tree in trees]
    refused: list[str] = []
    for path in those_of(PATHS, model):
        difference = _difference(model, trees, expected, path)
        if isinstance(difference, float) and difference <= TOLERANCE[causal_model(model).dtype]:
            return announced(replace(path, worst_difference=difference), refused)
        refused.append(f"{path.layout} rows with the {path.head} head: {reason(difference)}")
    return announced(DEFINITION, refused)


def those_of(paths: Sequence[ScoringPath], model: nn.Module) -> list[ScoringPath]:
    """Packing replaces sdpa, and many small products pay on a CPU only."""
    packs = causal_model(model).config._attn_implementation == "sdpa"
    packs = packs and input_device(model).type == "cpu"
    return [path for path in paths if packs or path.layout != "packed"]


def probe_trees(config: Any) -> list[Tree]:
    """Seeded rows of uneven lengths, some longer than the model's window."""
    text_config = config.get_text_config(decoder=True)
    shapes = list(PROBE_SHAPES)
    window = _window(text_config)
    if 0 < window <= LONGEST_WINDOW:
        shapes += [(window + 5, (4, 7)), (max(1, window // 2), (window + 3, 2))]
    elif window:
        logger.info("The model's attention window of %d tokens is longer than the probe.", window)
    random = np.random.default_rng(0)
    tokens = _ordinary_tokens(text_config)
    return [
        Tree(_draw(random, tokens, prompt), tuple(_draw(random, tokens, size) for size in branches))
        for prompt, branches in shapes
    ]


def _own_logps(model: nn.Module, tree: Tree) -> Tensor:
    """One branch at a time, no padding: the definition."""
    parts = [
        tree_logps(model, [Tree(tree.prompt, (branch,))], DEFINITION) for branch in tree.branches
    ]
    return torch.cat(parts)


def _difference(
    model: nn.Module, trees: list[Tree], expected: list[Tensor], path: ScoringPath
) -> float | Exception:
    """The worst branch's distance from the definition, or why it cannot be had."""
    if path.head == "fused" and output_head(causal_model(model)) is None:
        return ValueError("the head is not a plain projection")
    try:
        measured = tree_logps(model, trees, path)
    except Exception as error:  # model code refuses a mask in any way it likes
        return error
    lengths = [len(branch) for tree in trees for branch in tree.branches]
    gaps = torch.split(measured - torch.cat(expected), lengths)
    if causal_model(model).dtype == torch.float32:
        return max(abs(float(gap.double().sum())) for gap in gaps)
    return max(float(gap.abs().mean()) for gap in gaps)


def announced(path: ScoringPath, refused: list[str]) -> ScoringPath:
    """The path, once a person was told what kept faster ones from being used."""
    is_fast = path.layout != "plain" and path.head != "exact"
    if refused:
        # Trees with a dense mask are the ordinary case; only some models allow packing.
        logger.log(
            logging.INFO if is_fast else logging.WARNING,
            "Scoring with %s rows and the %s head, which is slower, because others differ from the "
            "model's own logits: %s.",
            path.layout,
            path.head,
            "; ".join(refused),
        )
    return path


def reason(difference: float | Exception) -> str:
    """Why a path is not used."""
    if isinstance(difference, float):
        return f"off by {difference:.2g}"
    return str(difference).split("\n", maxsplit=1)[0] or type(difference).__name__


def _window(config: Any) -> int:
    windows = [getattr(config, name, None) for name in ("sliding_window", "window_size")]
    return next((window for window in windows if isinstance(window, int)), 0)


def _ordinary_tokens(config: Any) -> np.ndarray:
    """Token ids without those the config gives a meaning (padding, images, ...)."""
    special = [value for name, value in vars(config).items() if name.endswith("_token_id")]
    special = [value for value in special if isinstance(value, int)]
    return np.setdiff1d(np.arange(config.vocab_size, dtype=np.int32), special)


def _draw(random: np.random.Generator, tokens: np.ndarray, size: int) -> np.ndarray:
    return random.choice(tokens, size)
