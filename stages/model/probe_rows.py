"""Seeded rows on which the probe compares the layouts and heads of a model."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import numpy as np

from ...schemas.rows import Tree

logger = logging.getLogger("align")

LONGEST_WINDOW = 512  # longer windows would make the probe itself expensive
PROBE_SHAPES = ((7, (5, 3, 9)), (1, (1, 4)), (12, (6, 1)), (3, (8,)))


def probe_trees(config: Any) -> list[Tree]:
    """Seeded rows of uneven lengths, some longer than the model's window."""
    text_config = config.get_text_config(decoder=True)
    shapes = list(PROBE_SHAPES)
    windows = [getattr(text_config, name, None) for name in ("sliding_window", "window_size")]
    window = next((window for window in windows if isinstance(window, int)), 0)
    if 0 < window <= LONGEST_WINDOW:
        shapes += [(window + 5, (4, 7)), (max(1, window // 2), (window + 3, 2))]
    elif window:
        logger.info("The model's attention window of %d tokens is longer than the probe.", window)
    random = np.random.default_rng(0)
    tokens = ordinary_tokens(config)
    return [
        Tree(_draw(random, tokens, prompt), tuple(_draw(random, tokens, size) for size in branches))
        for prompt, branches in shapes
    ]


def ordinary_tokens(config: Any) -> np.ndarray:
    """Token ids without those the config gives a meaning (padding, images, ...)."""
    text = config.get_text_config(decoder=True)
    named = chain(vars(config).items(), vars(text).items())
    special = [value for name, value in named if name.endswith(("_token_id", "_token_index"))]
    special = [value for value in special if isinstance(value, int)]
    return np.setdiff1d(np.arange(text.vocab_size, dtype=np.int32), special)


def _draw(random: np.random.Generator, tokens: np.ndarray, size: int) -> np.ndarray:
    return random.choice(tokens, size)
