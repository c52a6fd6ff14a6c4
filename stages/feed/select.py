"""Selects the completions and roles that a method reads from stored rows, and the held-out rows.

`select` runs over the narrow columns of every row group at start, and again on a row group whose
rows a step needs. Between the two, only the index of each row in its row group is kept.

A score that equals its threshold gives no label, and two scores that differ by at most the least
gap give no pair: ties are not trained on. Among equal scores the completion that is stored first
is the best. Scores are compared up to rounding (`schemas/score_gaps.py`): 0.3 is 0.1 above 0.2, and
0.2 is the mean of 0.1, 0.2 and 0.3, although neither holds for the nearest binary numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import StoredKind, completion_layout
from ...schemas.columns import Ragged, joined_ranges, offsets_of
from ...schemas.methods import RowKind
from ...schemas.option import Threshold
from ...schemas.row_table import Rows
from ...schemas.rows import Role
from ...schemas.score_gaps import TOLERANCE, further_apart, without_rounding
from .epoch_order import key_of, mixed

GOOD, BAD = (Role.CHOSEN, Role.DESIRABLE), (Role.REJECTED, Role.UNDESIRABLE)


@dataclass(frozen=True)
class ScoreRules:
    """The rules for making pairs or labels of scored completions."""

    pairs: Literal["best_worst", "all"] = "best_worst"
    min_gap: float = 0.0  # the scores of a pair differ by more than this
    threshold: Threshold = "mean"  # of the row's own scores, or one number for all rows
    bad_score: float = 0.0  # of bad completions in rows without scores; good ones have 1


@dataclass(frozen=True)
class ReadSpec:
    """The rules for reading stored rows: kind, conversion, needed values, split."""

    kind: RowKind
    mismatched: bool  # whether KL completions are read too
    eval_fraction: float
    rules: ScoreRules = ScoreRules()
    needs_scores: bool = False  # whether every completion must have a score
    columns: tuple[str, ...] = ()  # data columns that must have numbers
    # Tokens between the prompt and a completion of this role. If set, every completion is a row of
    # its own, whose prompt ends with them.
    context: Mapping[Role, tuple[int, ...]] = field(default_factory=dict)
    file_weights: Mapping[str, float] = field(default_factory=dict)  # of data files, by name
    # The shares of training prompts whose desirable and undesirable completions are learned from,
    # and the seed that draws these prompts.
    label_shares: tuple[float, float] = (1.0, 1.0)
    seed: int = 0


@dataclass(frozen=True)
class Picked:
    """The own completions of rows, in stored order; a stored row becomes any number of rows."""

    rows: NDArray[np.int64]  # (rows,) index of each row's stored row, ascending
    offsets: NDArray[np.int64]  # (rows + 1,) into the completions; every row has at least one
    indices: NDArray[np.int64]  # (completions,) of stored completions; chosen before rejected
    roles: NDArray[np.int8]  # (completions,) as the method reads them
    scores: NDArray[np.float64]  # (completions,) NaN if there is none

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of completions of each row."""
        return np.diff(self.offsets)

    @property
    def row_of(self) -> NDArray[np.int64]:
        """The index of each completion's row."""
        return np.repeat(np.arange(len(self.rows)), self.counts)

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """Mask of the rows with a score for every completion, (rows,)."""
        missing = np.diff(offsets_of(~np.isfinite(self.scores))[self.offsets])
        is_scored: NDArray[np.bool_] = missing == 0
        return is_scored

    def keep(self, kept: NDArray[np.bool_]) -> Picked:
        """The completions where `kept`; rows without any are left out."""
        counts = np.diff(offsets_of(kept)[self.offsets])
        offsets = offsets_of(counts[counts > 0])
        return Picked(
            self.rows[counts > 0], offsets, self.indices[kept], self.roles[kept], self.scores[kept]
        )

    def keep_rows(self, kept: NDArray[np.bool_]) -> Picked:
        """The rows where `kept`."""
        return self.keep(np.repeat(kept, self.counts))

    @staticmethod
    def joined(parts: Sequence[Picked]) -> Picked:
        """The rows of all parts, in stored order."""
        rows, counts, indices, roles, scores = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("rows", "counts", "indices", "roles", "scores")
        )
        order = np.argsort(rows, kind="stable")
        completions = joined_ranges(offsets_of(counts)[:-1][order], counts[order])
        return Picked(
            rows[order],
            offsets_of(counts[order]),
            indices[completions],
            roles[completions],
            scores[completions],
        )


@dataclass(frozen=True)
class KindCounts:
    """Counts of the stored rows of one kind, and of the rows made from them."""

    stored: int = 0
    read: int = 0  # stored rows that are read
    made: int = 0  # resulting rows
    unscored: int = 0  # stored rows with a completion without a score
    left_out: int = 0  # completions of read rows that no resulting row uses

    def __add__(self, other: KindCounts) -> KindCounts:
        return KindCounts(*(sum(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def select(
    roles: NDArray[np.int8],
    scores: NDArray[np.float64],
    completion_offsets: NDArray[np.int64],
    *,
    spec: ReadSpec,
    source: str,
    split_keys: NDArray[np.uint64],  # (stored rows,)
) -> tuple[Picked, NDArray[np.int64], dict[StoredKind, KindCounts]]:
    """The rows that a method reads, the stored indices of their KL completions, and counts.

    A stored row has its own completions first, then the first KL completion of each, then the
    second. The indices are (completions, partners).
    """
    layout = completion_layout(roles, completion_offsets, source=source)
    rows = np.arange(len(layout.starts))
    indices = joined_ranges(layout.starts, layout.num_own)
    is_rejected = roles[indices] == Role.REJECTED
    indices = indices[np.lexsort((is_rejected, np.repeat(rows, layout.num_own)))]
    every = Picked(rows, offsets_of(layout.num_own), indices, roles[indices], scores[indices])
    nothing = every.keep_rows(rows < 0)
    parts, counts = [nothing], dict[StoredKind, KindCounts]()
    for kind in StoredKind:
        stored = every.keep_rows(layout.kinds == kind)
        if not len(stored.rows):
            continue
        convert = CONVERSIONS[spec.kind].get(kind)
        made = convert(stored, spec.rules) if convert else nothing
        parts.append(made)
        read = np.isin(stored.rows, made.rows)
        counts[kind] = KindCounts(
            stored=len(stored.rows),
            read=int(read.sum()),
            made=len(made.rows),
            unscored=int((~stored.is_scored).sum()),
            left_out=int(stored.counts[read].sum()) - len(np.unique(made.indices)),
        )
    picked = Picked.joined(parts)
    if spec.label_shares != (1.0, 1.0):
        picked = picked.keep(_in_label_shares(picked, split_keys, spec))
    if spec.context:  # each completion as a row of its own
        offsets = np.arange(len(picked.indices) + 1)
        picked = replace(picked, rows=picked.rows[picked.row_of], offsets=offsets)
    stride = layout.num_own[picked.rows][picked.row_of]
    mismatched = picked.indices[:, None] + stride[:, None] * np.arange(1, layout.num_partners + 1)
    return picked, mismatched, counts


def as_read(stored: Rows, rows: NDArray[np.int64], *, spec: ReadSpec, source: str) -> Rows:
    """Some of the rows that a method reads from a row group, laid out as stored.

    They have only the completions that the method reads, with KL completions if it reads any.
    """
    columns = (stored.roles, stored.scores, stored.completion_offsets)
    picked, mismatched, _ = select(*columns, spec=spec, source=source, split_keys=stored.split_key)
    counts = picked.counts[rows]
    own = joined_ranges(picked.offsets[rows], counts)
    partners = mismatched.shape[1] if spec.mismatched else 0
    completions = np.concatenate([picked.indices[own], mismatched[own, :partners].T.ravel()])
    roles, scores = stored.roles[completions], stored.scores[completions]
    roles[: len(own)], scores[: len(own)] = picked.roles[own], picked.scores[own]
    row_of = np.tile(np.repeat(np.arange(len(rows)), counts), 1 + partners)
    order = np.argsort(row_of, kind="stable")
    offsets = offsets_of(counts * (1 + partners))
    read = stored.gather(picked.rows[rows], completions[order], offsets)
    prompts = read.prompts
    if spec.context:
        of_rows = picked.roles[picked.offsets[:-1][rows]].tolist()
        more = [np.array(spec.context[Role(role)], dtype=np.int32) for role in of_rows]
        longer = [np.append(ids, end) for ids, end in zip(prompts, more, strict=True)]
        prompts = Ragged.of(longer, np.int32)
    return read.with_columns(prompt_ids=prompts, role=roles[order], score=scores[order])


def context_lengths(picked: Picked, spec: ReadSpec) -> NDArray[np.int64]:
    """The number of tokens added to each row's prompt, (rows,)."""
    lengths = np.zeros(len(picked.rows), dtype=np.int64)
    for role, tokens in spec.context.items():
        lengths[picked.roles[picked.offsets[:-1]] == role] = len(tokens)
    return lengths


def held_out(split_keys: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Mask of the held-out rows: those with the lowest keys.

    The key of a prompt is the same in every cache. Prompts that differ only in white space, the
    system message, tools and options of the template have the same key.
    """
    if fraction in {0.0, 1.0}:
        return np.full(len(split_keys), fraction == 1.0)
    return split_keys < np.uint64(int(fraction * 2**64))


def _in_label_shares(
    picked: Picked, split_keys: NDArray[np.uint64], spec: ReadSpec
) -> NDArray[np.bool_]:
    """Mask of the completions within the shares of labels; held-out rows keep all.

    The seed draws an order of prompts. Desirable completions come from the first prompts and
    undesirable ones from the last, so shares that add up to 1 have no prompt in common.
    """
    keys = split_keys[picked.rows][picked.row_of]
    drawn = mixed(keys, key_of("prompts with a label", spec.seed))
    desirable, undesirable = spec.label_shares
    is_left = np.where(
        picked.roles == Role.DESIRABLE,
        held_out(drawn, desirable),
        ~held_out(drawn, 1.0 - undesirable),
    )
    return held_out(keys, spec.eval_fraction) | is_left


def pairs(own: Picked, rules: ScoreRules) -> Picked:
    """Pairs of the best and the worst completion of each row, or all pairs that differ enough."""
    own = _best_first(own.keep_rows(own.is_scored))
    if rules.pairs == "best_worst":
        better, worse = own.offsets[:-1], own.offsets[1:] - 1
    else:
        every = np.arange(len(own.indices))
        following = own.offsets[1:][own.row_of] - every - 1
        better, worse = np.repeat(every, following), joined_ranges(every + 1, following)
    far = further_apart(own.scores[better], own.scores[worse], rules.min_gap)
    better, worse = better[far], worse[far]
    completions = np.column_stack([better, worse]).ravel()
    return Picked(
        rows=own.rows[own.row_of[better]],
        offsets=2 * np.arange(len(better) + 1),
        indices=own.indices[completions],
        roles=np.tile(np.array([Role.CHOSEN, Role.REJECTED], dtype=np.int8), len(better)),
        scores=own.scores[completions],
    )


def labels_of_pairs(own: Picked, _: ScoreRules) -> Picked:
    """Labels of pairs: chosen is desirable, rejected undesirable."""
    return _with_labels(own, own.roles == Role.CHOSEN)


def labels_of_scores(own: Picked, rules: ScoreRules) -> Picked:
    """Labels of scored completions: desirable above the threshold, undesirable below it."""
    own = own.keep_rows(own.is_scored)
    scores, starts, counts = own.scores, own.offsets[:-1], own.counts
    if rules.threshold == "mean":
        # Not from running totals, whose rounding grows with the totals.
        thresholds = np.add.reduceat(scores, starts) / counts
    elif rules.threshold == "median":
        ordered = scores[np.lexsort((scores, own.row_of))]
        thresholds = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) / 2
    else:
        thresholds = np.full(len(own.rows), rules.threshold, dtype=np.float64)
    # A score equals its row's threshold if they differ by no more than rounding.
    slack = TOLERANCE * np.maximum.reduceat(np.abs(scores), starts)
    above = scores - thresholds[own.row_of]
    return _with_labels(own, above > 0).keep(np.abs(above) > slack[own.row_of])


def candidates(own: Picked, rules: ScoreRules) -> Picked:
    """Scored candidates; in a row without scores, good completions get 1 and others less."""
    lacks = np.repeat(~own.is_scored, own.counts)
    assumed = np.where(np.isin(own.roles, GOOD), 1.0, rules.bad_score)
    return scored_candidates(replace(own, scores=np.where(lacks, assumed, own.scores)), rules)


def scored_candidates(own: Picked, _: ScoreRules) -> Picked:
    """All completions as candidates, with the scores of the data."""
    return replace(own, roles=np.full_like(own.roles, Role.CANDIDATE))


def good_ones(own: Picked, _: ScoreRules) -> Picked:
    """The chosen or desirable completions."""
    is_good = np.isin(own.roles, GOOD)
    return _with_labels(own, is_good).keep(is_good)


def best_ones(own: Picked, _: ScoreRules) -> Picked:
    """The best completion of each row."""
    own = _best_first(own.keep_rows(own.is_scored))
    is_best = np.zeros(len(own.indices), dtype=np.bool_)
    is_best[own.offsets[:-1]] = True
    return _with_labels(own, is_best).keep(is_best)


def unchanged(own: Picked, _: ScoreRules) -> Picked:
    """The completions as they are stored."""
    return own


# One line for each kind of data that a kind of method can read; another is in train_source.py.
CONVERSIONS: dict[RowKind, dict[StoredKind, Callable[[Picked, ScoreRules], Picked]]] = {
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


def _best_first(own: Picked) -> Picked:
    order = np.lexsort((-without_rounding(own.scores, own.row_of), own.row_of))
    return replace(
        own, indices=own.indices[order], roles=own.roles[order], scores=own.scores[order]
    )


def _with_labels(own: Picked, is_good: NDArray[np.bool_]) -> Picked:
    labels = np.where(is_good, Role.DESIRABLE, Role.UNDESIRABLE)
    return replace(own, roles=labels.astype(np.int8))
