"""Selects what a method reads of stored rows: which completions, as what, and what is held out.

`select` runs over every row group at start, on its narrow columns, and again on a row group whose
rows a step needs: of each row only its index in the row group is kept in between.

A score too close to its threshold gives no label, and two scores that differ by at most the least
gap give no pair: ties are not trained on. Of equal scores the completion that is stored first is
the better one. Scores are compared up to rounding (`schemas/score_gaps.py`): 0.3 is 0.1 above 0.2
and 0.2 is the mean of 0.1, 0.2 and 0.3, though neither holds for the nearest binary numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import StoredKind, branch_layout
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
    """The rules that turn scored completions into pairs or labels."""

    pairs: Literal["best_worst", "all"] = "best_worst"
    min_gap: float = 0.0  # scores of a pair are further apart than this
    threshold: Threshold = "mean"  # of the row's own scores; or one number for all rows
    bad_score: float = 0.0  # of bad completions whose row lacks a score; good ones have 1


@dataclass(frozen=True)
class ReadSpec:
    """How stored rows are read: kind, conversion, needed values, split."""

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
    # Of the prompts that are not held out, those whose desirable completions are learned from, and
    # those whose undesirable ones are; and the seed that draws them.
    label_shares: tuple[float, float] = (1.0, 1.0)
    seed: int = 0


@dataclass(frozen=True)
class Picked:
    """Own branches of rows, in stored order; a stored row may give several rows, or none."""

    rows: NDArray[np.int64]  # (rows,) index of the stored row that each is made of, ascending
    offsets: NDArray[np.int64]  # (rows + 1,) into the branches; every row has at least one
    indices: NDArray[np.int64]  # (branches,) among the stored branches; chosen before rejected
    roles: NDArray[np.int8]  # (branches,) as the method reads them
    scores: NDArray[np.float64]  # (branches,) NaN where there is none

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

    def keep(self, kept: NDArray[np.bool_]) -> Picked:
        """The branches where `kept`; a row without any is left out."""
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
        """The rows of several, in stored order."""
        rows, counts, indices, roles, scores = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("rows", "counts", "indices", "roles", "scores")
        )
        order = np.argsort(rows, kind="stable")
        branches = joined_ranges(offsets_of(counts)[:-1][order], counts[order])
        return Picked(
            rows[order],
            offsets_of(counts[order]),
            indices[branches],
            roles[branches],
            scores[branches],
        )


@dataclass(frozen=True)
class KindCounts:
    """Counts of the stored rows of one kind, and of the rows made from them."""

    stored: int = 0
    read: int = 0  # of the stored ones
    made: int = 0  # rows made from them, as the method reads them
    unscored: int = 0  # stored rows where a completion has no score
    left_out: int = 0  # completions of the rows read that no resulting row uses

    def __add__(self, other: KindCounts) -> KindCounts:
        return KindCounts(*(sum(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def select(
    roles: NDArray[np.int8],
    scores: NDArray[np.float64],
    branch_offsets: NDArray[np.int64],
    *,
    spec: ReadSpec,
    source: str,
    split_keys: NDArray[np.uint64],  # (stored rows,)
) -> tuple[Picked, NDArray[np.int64], dict[StoredKind, KindCounts]]:
    """The rows that a method reads of stored ones, the indices of their mismatches, and counts.

    A stored row has its own branches first, then all first mismatches, then all second ones. The
    mismatches are (branches, partners).
    """
    layout = branch_layout(roles, branch_offsets, source=source)
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
    if spec.context:  # each branch as a row of its own
        offsets = np.arange(len(picked.indices) + 1)
        picked = replace(picked, rows=picked.rows[picked.row_of], offsets=offsets)
    stride = layout.num_own[picked.rows][picked.row_of]
    mismatched = picked.indices[:, None] + stride[:, None] * np.arange(1, layout.num_partners + 1)
    return picked, mismatched, counts


def as_read(stored: Rows, rows: NDArray[np.int64], *, spec: ReadSpec, source: str) -> Rows:
    """The rows at `rows` of those that a method reads of a row group, laid out as stored.

    They have only the branches that the method reads, with mismatches if it reads any.
    """
    columns = (stored.roles, stored.scores, stored.branch_offsets)
    picked, mismatched, _ = select(*columns, spec=spec, source=source, split_keys=stored.split_key)
    counts = picked.counts[rows]
    own = joined_ranges(picked.offsets[rows], counts)
    partners = mismatched.shape[1] if spec.mismatched else 0
    branches = np.concatenate([picked.indices[own], mismatched[own, :partners].T.ravel()])
    roles, scores = stored.roles[branches], stored.scores[branches]
    roles[: len(own)], scores[: len(own)] = picked.roles[own], picked.scores[own]
    row_of = np.tile(np.repeat(np.arange(len(rows)), counts), 1 + partners)
    order = np.argsort(row_of, kind="stable")
    offsets = offsets_of(counts * (1 + partners))
    read = stored.gather(picked.rows[rows], branches[order], offsets)
    prompts = read.prompts
    if spec.context:
        of_rows = picked.roles[picked.offsets[:-1][rows]].tolist()
        more = [np.array(spec.context[Role(role)], dtype=np.int32) for role in of_rows]
        longer = [np.append(ids, end) for ids, end in zip(prompts, more, strict=True)]
        prompts = Ragged.of(longer, np.int32)
    return read.with_columns(prompt_ids=prompts, role=roles[order], score=scores[order])


def context_lengths(picked: Picked, spec: ReadSpec) -> NDArray[np.int64]:
    """The number of tokens that are added to the prompt of each row, (rows,)."""
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
    """Mask of the branches that the shares of labels leave; all of held-out rows.

    Desirable completions come from the prompts that are first in an order drawn by the seed,
    undesirable ones from those that are last: shares that add up to 1 have no prompt in common.
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
    return Picked(
        rows=own.rows[own.row_of[better]],
        offsets=2 * np.arange(len(better) + 1),
        indices=own.indices[branches],
        roles=np.tile(np.array([Role.CHOSEN, Role.REJECTED], dtype=np.int8), len(better)),
        scores=own.scores[branches],
    )


def labels_of_pairs(own: Picked, _: ScoreRules) -> Picked:
    """Labels of pairs: chosen is desirable, rejected undesirable."""
    return _with_labels(own, own.roles == Role.CHOSEN)


def labels_of_scores(own: Picked, rules: ScoreRules) -> Picked:
    """Labels of scored branches: desirable above the threshold, undesirable below it."""
    own = own.keep_rows(own.is_scored)
    scores, starts, counts = own.scores, own.offsets[:-1], own.counts
    if rules.threshold == "mean":
        # Not by differences of running totals, whose rounding grows with the totals.
        thresholds = np.add.reduceat(scores, starts) / counts
    elif rules.threshold == "median":
        ordered = scores[np.lexsort((scores, own.row_of))]
        thresholds = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) / 2
    else:
        thresholds = np.full(len(own.rows), rules.threshold, dtype=np.float64)
    # The largest difference of a score from its row's threshold by rounding alone.
    slack = TOLERANCE * np.maximum.reduceat(np.abs(scores), starts)
    above = scores - thresholds[own.row_of]
    return _with_labels(own, above > 0).keep(np.abs(above) > slack[own.row_of])


def candidates(own: Picked, rules: ScoreRules) -> Picked:
    """Scored candidates; a row that lacks a score gets 1 for good branches, less for others."""
    lacks = np.repeat(~own.is_scored, own.counts)
    assumed = np.where(np.isin(own.roles, GOOD), 1.0, rules.bad_score)
    return scored_candidates(replace(own, scores=np.where(lacks, assumed, own.scores)), rules)


def scored_candidates(own: Picked, _: ScoreRules) -> Picked:
    """All branches as candidates with the scores of the data."""
    return replace(own, roles=np.full_like(own.roles, Role.CANDIDATE))


def good_ones(own: Picked, _: ScoreRules) -> Picked:
    """The chosen or desirable branches."""
    is_good = np.isin(own.roles, GOOD)
    return _with_labels(own, is_good).keep(is_good)


def best_ones(own: Picked, _: ScoreRules) -> Picked:
    """The best branch of each row."""
    own = _best_first(own.keep_rows(own.is_scored))
    is_best = np.zeros(len(own.indices), dtype=np.bool_)
    is_best[own.offsets[:-1]] = True
    return _with_labels(own, is_best).keep(is_best)


def unchanged(own: Picked, _: ScoreRules) -> Picked:
    """The branches as they are stored."""
    return own


# A kind of data that a kind of method can read is one more line here, and one in train_source.py.
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
