"""What a method wants of stored rows, and by which rules they become that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...schemas.methods import RowKind
    from ...schemas.rows import Role

Threshold: TypeAlias = Literal["mean", "median"] | float


@dataclass(frozen=True)
class ScoreRules:
    """How completions with scores become pairs, or get labels."""

    pairs: Literal["best_worst", "all"] = "best_worst"
    min_gap: float = 0.0  # scores of a pair are further apart than this
    threshold: Threshold = "mean"  # of the row's own scores; or one number for all rows
    bad_score: float = 0.0  # of bad completions whose row lacks a score; good ones have 1


@dataclass(frozen=True)
class Reading:
    """How stored rows are read and split."""

    kind: RowKind
    mismatched: bool  # whether mismatched branches are read too
    eval_fraction: float
    rules: ScoreRules = ScoreRules()
    needs_scores: bool = False  # whether every branch has to have one
    columns: tuple[str, ...] = ()  # of the data, that have to be there and hold numbers
    # Tokens between the prompt and a completion of this role. Where there are any, every branch
    # is read as a row of its own: its prompt ends in them.
    context: Mapping[Role, tuple[int, ...]] = field(default_factory=dict)
