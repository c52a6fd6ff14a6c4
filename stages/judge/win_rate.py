"""The win rate of one set of judged samples, with a bootstrap interval over its prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...schemas.errors import UsageError
from ...schemas.score_gaps import further_apart
from ..report.intervals import interval_of_rate

if TYPE_CHECKING:
    import polars as pl

OUTCOMES = ("wins", "ties", "losses")
SAMPLE = ("prompt_key", "number")


@dataclass(frozen=True)
class WinRate:
    """The win rate of samples, ties counted half, with its bootstrap interval over prompts."""

    rate: float
    low: float
    high: float
    ties: float  # the fraction of comparisons without a winner
    n: int  # comparisons
    unjudged: int  # comparisons that the judge refused, or that lack one side's sample


def win_rate(ours: pl.DataFrame, theirs: pl.DataFrame | None = None, *, seed: int = 0) -> WinRate:
    """The win rate of judged samples.

    Against `theirs`, scores of the same prompt and number are compared, and equal answers are a
    tie in whichever batches they were scored; without them, `ours` were compared by the judge
    itself, and their wins, ties and losses are counted.
    """
    prompts, outcomes, unjudged = _counted(ours) if theirs is None else _compared(ours, theirs)
    comparisons = outcomes.sum(axis=1)
    if not comparisons.sum():
        raise UsageError(
            "There is no judged comparison to make a win rate of. Judge both with the same judge, "
            "or one with judge.against and pairwise."
        )
    points = outcomes @ np.array([1.0, 0.5, 0.0])
    _, groups = np.unique(prompts, return_inverse=True)
    won, of = np.bincount(groups, points), np.bincount(groups, comparisons)
    low, high = interval_of_rate(won[of > 0], of[of > 0], seed=seed)
    total = int(comparisons.sum())
    ties = float(outcomes[:, 1].sum() / total)
    return WinRate(float(points.sum() / total), low, high, ties, total, unjudged)


def _counted(ours: pl.DataFrame) -> tuple[NDArray[Any], NDArray[np.int64], int]:
    """The prompt of each sample, its wins, ties and losses, and the count of unjudged samples."""
    if missing := [name for name in OUTCOMES if name not in ours.columns]:
        raise UsageError(
            f"The judged samples have no column {missing[0]!r}: they were not judged pairwise. "
            "Give the judged samples to compare them with."
        )
    columns = [ours[name].fill_null(0).to_numpy() for name in OUTCOMES]
    outcomes = np.stack(columns, axis=1).astype(np.int64)
    return ours["prompt_key"].to_numpy(), outcomes, int((outcomes.sum(axis=1) == 0).sum())


def _compared(
    ours: pl.DataFrame, theirs: pl.DataFrame
) -> tuple[NDArray[Any], NDArray[np.int64], int]:
    """The prompt and the outcome of each pair of samples, and the count of unjudged pairs."""
    first, second = _by_sample(ours, "score"), _by_sample(theirs, "score")
    both = [key for key in first if first[key] is not None and second.get(key) is not None]
    ours_of, theirs_of = (np.array([of[key] for key in both], np.float64) for of in (first, second))
    said, replied = _by_sample(ours, "completion"), _by_sample(theirs, "completion")
    differ = np.array([said[key] != replied[key] for key in both], np.bool_)
    won = differ & further_apart(ours_of, theirs_of, 0.0)
    lost = differ & further_apart(theirs_of, ours_of, 0.0)
    outcomes = np.stack([won, ~(won | lost), lost], axis=1).astype(np.int64)
    return np.array([key[0] for key in both]), outcomes, len(first.keys() | second) - len(both)


def _by_sample(table: pl.DataFrame, column: str) -> dict[tuple[str, int], Any]:
    return {(key, number): cell for key, number, cell in table[[*SAMPLE, column]].iter_rows()}
