"""Conversions of rows between kinds of data: pairs, labels, scored groups, and rows to imitate.

A score too close to its threshold gives no label, and two scores that differ by at most the least
gap give no pair: ties are not trained on. Of equal scores the completion that is stored first is
the better one.

Scores are compared as the decimals they were written as: 0.3 is 0.1 above 0.2 and 0.2 is the mean
of 0.1, 0.2 and 0.3, though neither holds for the nearest binary numbers. So two numbers count as
equal if they differ by no more than the rounding of the scores and of the arithmetic; long
fractions that float32 represents exactly were rounded to float32.
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
from ...schemas.score_gaps import ROUNDINGS, further_apart, precision, without_rounding
from .prompt_split import LabelShares


@dataclass(frozen=True)
class Own:
    """Own branches of some rows, row by row; every row has at least one."""

    rows: NDArray[np.int64]  # (rows,) index of the stored row that each is made of, ascending
    offsets: NDArray[np.int64]  # (rows + 1,)
    indices: NDArray[np.int64]  # (branches,) among the stored branches
    roles: NDArray[np.int8]  # (branches,)
    scores: NDArray[np.float64]  # (branches,) NaN where the data gives none

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of branches of each row."""
        return np.diff(self.offsets)

    @property
    def row_of(self) -> NDArray[np.int64]:
        """The index of each branch's row."""
        return np.repeat(np.arange(len(self.rows)), self.counts)

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """Mask of the rows with a score for every branch, (rows,)."""
        missing = np.diff(offsets_of(~np.isfinite(self.scores))[self.offsets])
        is_scored: NDArray[np.bool_] = missing == 0
        return is_scored

    def keep(self, kept: NDArray[np.bool_]) -> Own:
        """The branches where `kept`; a row without any is left out."""
        counts = np.diff(offsets_of(kept)[self.offsets])
        rows = self.rows[counts > 0]
        offsets = offsets_of(counts[counts > 0])
        return Own(rows, offsets, self.indices[kept], self.roles[kept], self.scores[kept])

    def keep_rows(self, kept: NDArray[np.bool_]) -> Own:
        """The rows where `kept`."""
        return self.keep(np.repeat(kept, self.counts))

    def apart(self) -> Own:
        """Each branch as a row of its own."""
        offsets = np.arange(len(self.indices) + 1)
        return replace(self, rows=np.repeat(self.rows, self.counts), offsets=offsets)

    @staticmethod
    def joined(parts: Sequence[Own]) -> Own:
        """The rows of several, in stored order."""
        counts = np.concatenate([part.counts for part in parts])
        rows = np.concatenate([part.rows for part in parts])
        order = np.argsort(rows, kind="stable")
        branches = joined_ranges(offsets_of(counts)[:-1][order], counts[order])
        return Own(
            rows[order],
            offsets_of(counts[order]),
            np.concatenate([part.indices for part in parts])[branches],
            np.concatenate([part.roles for part in parts])[branches],
            np.concatenate([part.scores for part in parts])[branches],
        )


def pairs(own: Own, rules: ScoreRules) -> Own:
    """Pairs of the best and the worst branch of each row, or of every better and worse one."""
    own = _best_first(own.keep_rows(own.is_scored))
    if rules.pairs == "best_worst":
        better, worse = own.offsets[:-1], own.offsets[1:] - 1
    else:
        every = np.arange(len(own.indices))
        following = own.offsets[1:][own.row_of] - every - 1
        better, worse = np.repeat(every, following), joined_ranges(every + 1, following)
    far = further_apart(own.scores[better], own.scores[worse], rules.min_gap)
    better, worse = better[far], worse[far]
    branches = np.column_stack([better, worse]).ravel()
    return Own(
        rows=own.rows[own.row_of[better]],
        offsets=2 * np.arange(len(better) + 1),
        indices=own.indices[branches],
        roles=np.tile(np.array([Role.CHOSEN, Role.REJECTED], dtype=np.int8), len(better)),
        scores=own.scores[branches],
    )


def labels_of_pairs(own: Own, _: ScoreRules) -> Own:
    """Labels of pairs: chosen is desirable, rejected undesirable."""
    return _with_labels(own, own.roles == Role.CHOSEN)


def labels_of_scores(own: Own, rules: ScoreRules) -> Own:
    """Labels of scored branches: desirable above the threshold, undesirable below it."""
    own = own.keep_rows(own.is_scored)
    above = own.scores - _thresholds(own, rules.threshold)[own.row_of]
    return _with_labels(own, above > 0).keep(np.abs(above) > _slack_of_rows(own)[own.row_of])


def candidates(own: Own, rules: ScoreRules) -> Own:
    """Scored candidates; a row that lacks a score gets 1 for good branches, less for others."""
    lacks = np.repeat(~own.is_scored, own.counts)
    is_good = np.isin(own.roles, (Role.CHOSEN, Role.DESIRABLE))
    assumed = np.where(is_good, 1.0, rules.bad_score)
    scored = replace(own, scores=np.where(lacks, assumed, own.scores))
    return scored_candidates(scored, rules)


def scored_candidates(own: Own, _: ScoreRules) -> Own:
    """All branches as candidates with the scores of the data."""
    return replace(own, roles=np.full_like(own.roles, Role.CANDIDATE))


def good_ones(own: Own, _: ScoreRules) -> Own:
    """The chosen or desirable branches."""
    good = own.keep(np.isin(own.roles, (Role.CHOSEN, Role.DESIRABLE)))
    return _with_labels(good, np.ones(len(good.indices), dtype=np.bool_))


def best_ones(own: Own, _: ScoreRules) -> Own:
    """The best branch of each row."""
    own = _best_first(own.keep_rows(own.is_scored))
    is_best = np.zeros(len(own.indices), dtype=np.bool_)
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
    order = np.lexsort((-without_rounding(own.scores, own.row_of), own.row_of))
    return replace(
        own, indices=own.indices[order], roles=own.roles[order], scores=own.scores[order]
    )


def _with_labels(own: Own, is_good: NDArray[np.bool_]) -> Own:
    labels = np.where(is_good, Role.DESIRABLE, Role.UNDESIRABLE)
    return replace(own, roles=labels.astype(np.int8))


def _thresholds(own: Own, threshold: Threshold) -> NDArray[np.float64]:
    """The threshold of each row, (rows,)."""
    scores, starts = own.scores, own.offsets[:-1]
    if threshold == "mean":
        # Not by differences of running totals, whose rounding grows with the totals.
        return np.asarray(np.add.reduceat(scores, starts) / own.counts)
    if threshold == "median":
        ordered = scores[np.lexsort((scores, own.row_of))]
        below, above = starts + (own.counts - 1) // 2, starts + own.counts // 2
        return np.asarray((ordered[below] + ordered[above]) / 2)
    return np.full(len(own.rows), threshold, dtype=np.float64)


def _slack_of_rows(own: Own) -> NDArray[np.float64]:
    """The largest difference of a score from its row's threshold by rounding alone, (rows,)."""
    starts = own.offsets[:-1]
    sizes = np.maximum.reduceat(np.abs(own.scores), starts)
    slack: NDArray[np.float64] = np.asarray(
        (ROUNDINGS + own.counts) * sizes * np.maximum.reduceat(precision(own.scores), starts)
    )
    return slack


Threshold: TypeAlias = Literal["mean", "median"] | float


@dataclass(frozen=True)
class ScoreRules:
    """The rules that turn scored completions into pairs or labels."""

    pairs: Literal["best_worst", "all"] = "best_worst"
    min_gap: float = 0.0  # scores of a pair are further apart than this
    threshold: Threshold = "mean"  # of the row's own scores; or one number for all rows
    bad_score: float = 0.0  # of bad completions whose row lacks a score; good ones have 1


@dataclass(frozen=True)
class ReadSpec:
    """The specification by which stored rows are read: kind, conversion, needed values, split."""

    kind: RowKind
    mismatched: bool  # whether mismatched branches are read too
    eval_fraction: float
    rules: ScoreRules = ScoreRules()
    needs_scores: bool = False  # whether every branch has to have one
    columns: tuple[str, ...] = ()  # of the data, that have to be there and hold numbers
    # Tokens between the prompt and a completion of this role. If there are any, every branch is
    # read as a row of its own, whose prompt ends with them.
    context: Mapping[Role, tuple[int, ...]] = field(default_factory=dict)
    file_weights: Mapping[str, float] = field(default_factory=dict)  # of data files, by name
    label_shares: LabelShares = field(default_factory=LabelShares)  # of rows not held out
