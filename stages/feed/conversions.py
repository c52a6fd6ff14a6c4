"""Rows of one kind of data as another kind of method reads them.

A score too close to its threshold makes no label, and two that are no further apart
than the least gap make no pair: a tie is not learned from. Of equal scores the completion
that is stored first is the better one.

Scores are compared as the decimals they were written as: 0.3 is 0.1 above 0.2 and 0.2 is the mean
of 0.1, 0.2 and 0.3, though neither is so of the nearest binary numbers. So two numbers count as
equal where no more than the rounding of the scores, and of what is computed of them, can be between
them; long fractions that float32 holds exactly were rounded to that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import StoredKind
from ...schemas.columns import joined_ranges, offsets_of
from ...schemas.methods import RowKind
from ...schemas.rows import Role
from ...schemas.score_gaps import ROUNDINGS, further_apart, levelled, precision


@dataclass(frozen=True)
class Own:
    """Own branches of some rows, row by row; every row has at least one."""

    rows: NDArray[np.int64]  # (rows,) the stored row each is made of, rising
    offsets: NDArray[np.int64]  # (rows + 1,)
    places: NDArray[np.int64]  # (branches,) among the stored branches
    roles: NDArray[np.int8]  # (branches,)
    scores: NDArray[np.float64]  # (branches,) NaN where the data gives none

    @property
    def counts(self) -> NDArray[np.int64]:
        """How many branches each row has."""
        return np.diff(self.offsets)

    @property
    def row_of(self) -> NDArray[np.int64]:
        """The row of each branch."""
        return np.repeat(np.arange(len(self.rows)), self.counts)

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """Which rows have a score for every branch, (rows,)."""
        missing = np.diff(offsets_of(~np.isfinite(self.scores))[self.offsets])
        is_scored: NDArray[np.bool_] = missing == 0
        return is_scored

    def keep(self, kept: NDArray[np.bool_]) -> Own:
        """These branches only; a row that keeps none is left out."""
        counts = np.diff(offsets_of(kept)[self.offsets])
        rows = self.rows[counts > 0]
        offsets = offsets_of(counts[counts > 0])
        return Own(rows, offsets, self.places[kept], self.roles[kept], self.scores[kept])

    def keep_rows(self, kept: NDArray[np.bool_]) -> Own:
        """These rows only."""
        return self.keep(np.repeat(kept, self.counts))

    def apart(self) -> Own:
        """Each branch as a row of its own."""
        offsets = np.arange(len(self.places) + 1)
        return replace(self, rows=np.repeat(self.rows, self.counts), offsets=offsets)

    @staticmethod
    def joined(parts: Sequence[Own]) -> Own:
        """Joins several, rows in stored order."""
        counts = np.concatenate([part.counts for part in parts])
        rows = np.concatenate([part.rows for part in parts])
        order = np.argsort(rows, kind="stable")
        branches = joined_ranges(offsets_of(counts)[:-1][order], counts[order])
        return Own(
            rows[order],
            offsets_of(counts[order]),
            np.concatenate([part.places for part in parts])[branches],
            np.concatenate([part.roles for part in parts])[branches],
            np.concatenate([part.scores for part in parts])[branches],
        )


def pairs(own: Own, rules: ScoreRules) -> Own:
    """The best against the worst of each row, or every better one against every worse one."""
    own = _best_first(own.keep_rows(own.is_scored))
    if rules.pairs == "best_worst":
        better, worse = own.offsets[:-1], own.offsets[1:] - 1
    else:
        every = np.arange(len(own.places))
        behind = own.offsets[1:][own.row_of] - every - 1
        better, worse = np.repeat(every, behind), joined_ranges(every + 1, behind)
    far = further_apart(own.scores[better], own.scores[worse], rules.min_gap)
    better, worse = better[far], worse[far]
    branches = np.column_stack([better, worse]).ravel()
    return Own(
        rows=own.rows[own.row_of[better]],
        offsets=2 * np.arange(len(better) + 1),
        places=own.places[branches],
        roles=np.tile(np.array([Role.CHOSEN, Role.REJECTED], dtype=np.int8), len(better)),
        scores=own.scores[branches],
    )


def labels_of_pairs(own: Own, _: ScoreRules) -> Own:
    """Chosen is desirable, rejected is not."""
    return _with_labels(own, own.roles == Role.CHOSEN)


def labels_of_scores(own: Own, rules: ScoreRules) -> Own:
    """Desirable above the threshold, undesirable below it."""
    own = own.keep_rows(own.is_scored)
    above = own.scores - _thresholds(own, rules.threshold)[own.row_of]
    return _with_labels(own, above > 0).keep(np.abs(above) > _slack_of_rows(own)[own.row_of])


def candidates(own: Own, rules: ScoreRules) -> Own:
    """With the data's scores; a row that lacks one gets 1 for good branches and less for others."""
    lacks = np.repeat(~own.is_scored, own.counts)
    is_good = np.isin(own.roles, (Role.CHOSEN, Role.DESIRABLE))
    assumed = np.where(is_good, 1.0, rules.bad_score)
    scored = replace(own, scores=np.where(lacks, assumed, own.scores))
    return scored_candidates(scored, rules)


def scored_candidates(own: Own, _: ScoreRules) -> Own:
    """All branches, with the scores that the data has."""
    return replace(own, roles=np.full_like(own.roles, Role.CANDIDATE))


def good_ones(own: Own, _: ScoreRules) -> Own:
    """The chosen or desirable branches."""
    good = own.keep(np.isin(own.roles, (Role.CHOSEN, Role.DESIRABLE)))
    return _with_labels(good, np.ones(len(good.places), dtype=np.bool_))


def best_ones(own: Own, _: ScoreRules) -> Own:
    """The best branch of each row."""
    own = _best_first(own.keep_rows(own.is_scored))
    is_best = np.zeros(len(own.places), dtype=np.bool_)
    is_best[own.offsets[:-1]] = True
    return _with_labels(own, is_best).keep(is_best)


def unchanged(own: Own, _: ScoreRules) -> Own:
    """The branches as they are stored."""
    return own


# A kind of data that a kind of method can read is one more line here, and one in train_source.py.
CONVERSIONS: dict[RowKind, dict[StoredKind, Callable[[Own, ScoreRules], Own]]] = {
    "paired": {StoredKind.PAIRED: unchanged, StoredKind.SCORED: pairs},
    "labelled": {
        StoredKind.PAIRED: labels_of_pairs,
        StoredKind.UNPAIRED: unchanged,
        StoredKind.SCORED: labels_of_scores,
    },
    "grouped": {
        StoredKind.PAIRED: candidates,
        StoredKind.UNPAIRED: candidates,
        StoredKind.SCORED: scored_candidates,
    },
    "imitated": {
        StoredKind.PAIRED: good_ones,
        StoredKind.UNPAIRED: good_ones,
        StoredKind.SCORED: best_ones,
    },
}


def _best_first(own: Own) -> Own:
    order = np.lexsort((-levelled(own.scores, own.row_of), own.row_of))
    return replace(own, places=own.places[order], roles=own.roles[order], scores=own.scores[order])


def _with_labels(own: Own, is_good: NDArray[np.bool_]) -> Own:
    labels = np.where(is_good, Role.DESIRABLE, Role.UNDESIRABLE)
    return replace(own, roles=labels.astype(np.int8))


def _thresholds(own: Own, threshold: Threshold) -> NDArray[np.float64]:
    """One of each row."""
    scores, starts = own.scores, own.offsets[:-1]
    if threshold == "mean":
        # Not differences of running totals, which round by the size of the totals.
        return np.asarray(np.add.reduceat(scores, starts) / own.counts)
    if threshold == "median":
        ordered = scores[np.lexsort((scores, own.row_of))]
        below, above = starts + (own.counts - 1) // 2, starts + own.counts // 2
        return np.asarray((ordered[below] + ordered[above]) / 2)
    return np.full(len(own.rows), threshold, dtype=np.float64)


def _slack_of_rows(own: Own) -> NDArray[np.float64]:
    """How far a score of each row may be from its threshold by rounding alone, (rows,)."""
    starts = own.offsets[:-1]
    sizes = np.maximum.reduceat(np.abs(own.scores), starts)
    slack: NDArray[np.float64] = np.asarray(
        (ROUNDINGS + own.counts) * sizes * np.maximum.reduceat(precision(own.scores), starts)
    )
    return slack


Threshold: TypeAlias = Literal["mean", "median"] | float


@dataclass(frozen=True)
class ScoreRules:
    """How scored completions become pairs or labels."""

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
