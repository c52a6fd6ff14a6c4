"""Every shape of rows that is known: a line each, from which all else is derived."""

from __future__ import annotations

from .data_shape import DataShape
from .foreign_rows import read_alpaca_eval, read_ultrafeedback
from .preference_rows import read_labelled, read_pair, read_scored, read_single

DATA_SHAPES = (
    DataShape(
        "paired",
        ("chosen", "rejected"),
        read_pair,
        scores=("chosen_score", "rejected_score"),
        has_labels=True,
    ),
    DataShape(
        "unpaired",
        ("prompt", "completion", "label"),
        read_labelled,
        has_labels=True,
        is_single=True,
    ),
    DataShape("scored", ("prompt", "completions"), read_scored, scores=("scores",)),
    DataShape("scored_long", ("prompt", "completion", "score"), read_single, is_single=True),
    DataShape("UltraFeedback", ("instruction", "completions"), read_ultrafeedback, is_foreign=True),
    DataShape("AlpacaEval", ("instruction", "output"), read_alpaca_eval, is_foreign=True),
)
