"""Finished caches, opened for one kind of method, with notes on their rows.

The notes report conversions, rows that are left out, and prompts that are in both the training and
the held-out rows, or nearly so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schemas.arrow_columns import number_column
from ...schemas.cache import Manifest, StoredKind
from ...schemas.errors import UsageError
from ...schemas.methods import Labels, RowKind
from ..storage.cache.cache_folder import CacheFolder
from ..storage.cache.shards import open_shard
from ..storage.cache.verify_cache import naming_unit
from .cache_index import SCORES, Index, ShardColumns, build_index
from .conversions import CONVERSIONS, ReadSpec
from .file_weights import SETTING
from .prompt_split import held_out
from .row_selection import KindCounts

_SERVE = {
    StoredKind.PAIRED: "Paired rows serve every method.",
    StoredKind.UNPAIRED: "Unpaired rows serve methods that read no pairs, such as kto.",
    StoredKind.SCORED: "Scored rows serve every method once their scores tell them apart.",
}


@dataclass(frozen=True)
class TrainSource:
    """A cache and the index of its rows; tokens are read when a step needs them."""

    folder: CacheFolder
    manifest: Manifest
    spec: ReadSpec
    columns: ShardColumns
    index: Index
    notes: tuple[str, ...]  # what a person should know

    @property
    def train_rows(self) -> int:
        """The number of training rows."""
        return len(self.index.train)

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows that an epoch draws."""
        return self.index.train.rows_per_epoch

    @property
    def eval_rows(self) -> int:
        """The number of held-out rows."""
        return len(self.index.held_out)

    @property
    def num_partners(self) -> int:
        """The number of mismatched partners of each completion in the cache."""
        return self.index.num_partners

    @property
    def labels(self) -> Labels:
        """The number of branches of each label in the training rows."""
        return Labels(self.index.desirable, self.index.undesirable)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the rows of each kind and of what they become, by name."""
        return {
            f"rows.{kind.name.lower()}.{name}": count
            for kind, counts in self.index.kinds.items()
            for name, count in vars(counts).items()
        }


def open_source(
    folder: CacheFolder, manifest: Manifest, spec: ReadSpec, columns: ShardColumns
) -> TrainSource:
    """The source of a cache, with its rows indexed; `eval_fraction` 1 is for evaluation only."""
    fraction = spec.eval_fraction
    if not 0 <= fraction <= 1:
        raise UsageError(f"eval_fraction is {fraction}; it must be between 0 and 1.")
    _require_columns(folder, manifest, spec)
    index = build_index(folder, manifest, spec, columns)
    notes = (*_notes(index, spec), *_file_notes(index, manifest))
    source = TrainSource(folder, manifest, spec, columns, index, notes)
    _require_rows(source)
    _require_numbers(source)
    if spec.mismatched and not index.num_partners:
        raise UsageError(
            f"{folder.root} holds no mismatched completions, and this method needs them. "
            "Run `align precompute-ref` again with --kl-pairs 1; nothing is scored twice."
        )
    return source


def _require_rows(source: TrainSource) -> None:
    root, kind = source.folder.root, source.spec.kind
    if source.train_rows + source.eval_rows == 0:
        stored = source.index.kinds
        held = " and ".join(f"{stored[kind].stored:,} {STORED[kind]}" for kind in sorted(stored))
        serve = "".join(f"{_SERVE[kind]} " for kind in sorted(stored))
        why = "".join(f"{note} " for note in source.notes)
        raise UsageError(
            f"The method is {kind}: it reads {WANTED[kind]}. Of them {root} holds none; "
            f"its rows are: {held or 'none at all'}. "
            f"{why}{serve}`align methods` describes them."
        )
    if source.train_rows == 0 and source.spec.eval_fraction < 1:
        raise UsageError(
            f"All {source.eval_rows:,} rows of {root} are held out for evaluation. "
            "Lower train.eval_fraction, or add rows with other prompts."
        )
    if source.train_rows and not source.rows_per_epoch:
        raise UsageError(
            f"{SETTING} leaves no row of {root} to learn from. Give a file more weight."
        )


def _require_columns(folder: CacheFolder, manifest: Manifest, spec: ReadSpec) -> None:
    """Refuses a cache without the columns that the method needs, by its first shard."""
    if not (spec.columns and manifest.shards):
        return
    with open_shard(folder.shard(manifest.shards[0])) as file:
        there = file.schema_arrow.names
    for name in spec.columns:
        if name not in there:
            raise UsageError(
                f"{folder.root} carries no column {name!r}, which method.margin or "
                "method.row_weight names. Make a cache that does with `align precompute-ref … "
                f"--set data.carry=[{name}] --output OTHER`; nothing is scored twice."
            )


def _require_numbers(source: TrainSource) -> None:
    root, missing = source.folder.root, source.index.missing
    if scoreless := missing.get(SCORES):
        raise UsageError(
            f"The method reads scores, and in {scoreless:,} rows of {root} a completion has none. "
            "Score the data with `align score`, or give their scores in the column 'scores' "
            "(of pairs: 'chosen_score' and 'rejected_score'), and make the cache again; nothing "
            "is scored by the reference twice."
        )
    for name in source.spec.columns:
        if missing[name]:
            raise UsageError(
                f"{missing[name]:,} rows of {root} have no number in their column {name!r}, which "
                "the method reads. Fill it in the data, and make the cache again."
            )


def _file_notes(index: Index, manifest: Manifest) -> Iterator[str]:
    """The draws of an epoch from each file, where weights say how many they are."""
    if (draws := index.train.draws) is None:
        return
    rows = np.bincount(draws.file_of, minlength=len(draws.per_epoch)).tolist()
    for entry, count, drawn in zip(manifest.inputs, rows, draws.per_epoch, strict=True):
        yield f"{entry.name}: {drawn:,} draws an epoch from {count:,} rows ({SETTING})."


def _notes(index: Index, spec: ReadSpec) -> tuple[str, ...]:
    notes = list(conversion_notes(index.kinds, spec))
    rows = len(index.train)
    if rows and spec.eval_fraction and not len(index.held_out):
        notes.append(f"eval_fraction {spec.eval_fraction} holds out none of {rows:,} rows.")
    if not (shares := spec.label_shares).are_whole:
        notes.append(
            f"{index.desirable:,} desirable and {index.undesirable:,} undesirable completions are "
            f"left by train.desirable_share {shares.desirable:g} and train.undesirable_share "
            f"{shares.undesirable:g} of the prompts."
        )
    return tuple(notes)


WANTED: dict[RowKind, str] = {
    "paired": "rows with one chosen and one rejected completion, or scored ones",
    "labelled": "completions with a label, pairs of them, or scored ones",
    "grouped": "groups of scored completions, or pairs and labels as such",
    "imitated": "completions that are chosen, desirable or the best of theirs",
}
STORED = {
    StoredKind.PAIRED: "paired (chosen, rejected)",
    StoredKind.UNPAIRED: "unpaired (a completion and its label)",
    StoredKind.SCORED: "scored (completions and their scores)",
}


def conversion_notes(kinds: Mapping[StoredKind, KindCounts], spec: ReadSpec) -> Iterator[str]:
    """A sentence for each kind of rows that is converted or left out."""
    total = sum(counts.stored for counts in kinds.values())
    for kind, counts in sorted(kinds.items()):
        if kind in CONVERSIONS[spec.kind]:
            yield from _converted(kind, counts, spec)
        else:
            yield (
                f"{counts.stored:,} of {total:,} rows are not read: they are {STORED[kind]}, "
                f"and the method reads {WANTED[spec.kind]}."
            )


def _converted(kind: StoredKind, counts: KindCounts, spec: ReadSpec) -> Iterator[str]:
    name = kind.name.lower()
    if counts.read and (become := _become(kind, counts, spec)):
        yield f"{counts.read:,} {name} rows are read as {become}."
    assumes = spec.kind == "grouped" and kind != StoredKind.SCORED
    if counts.unscored and assumes:
        yield (
            f"{counts.unscored:,} {name} rows lack scores of their own: chosen and desirable "
            f"completions get 1, others {spec.rules.bad_score:g}."
        )
    judged = kind == StoredKind.SCORED and spec.kind != "grouped"
    if unscored := counts.unscored if judged else 0:
        yield (
            f"{unscored:,} of {counts.stored:,} {name} rows are left out: a completion of each "
            "has no score. `align score` gives them some."
        )
    if dropped := counts.stored - counts.read - unscored:
        why = _why(kind, spec)
        yield f"{dropped:,} of {counts.stored:,} {name} rows are left out: {why}."
    if counts.left_out and (spec.kind, kind) == ("labelled", StoredKind.SCORED):
        yield (
            f"{counts.left_out:,} completions of scored rows get no label: their score is "
            f"{_threshold(spec)} itself (train.label_threshold)."
        )


def _become(kind: StoredKind, counts: KindCounts, spec: ReadSpec) -> str:
    """A description of what rows of a kind are converted to; empty if they are not."""
    rules = spec.rules
    which = {
        "best_worst": "the best against the worst",
        "all": f"all that are more than {rules.min_gap:g} apart",
    }[rules.pairs]
    ways: dict[tuple[RowKind, StoredKind], str] = {
        ("paired", StoredKind.SCORED): f"{counts.made:,} pairs: {which} (train.pairs_from_scores)",
        ("labelled", StoredKind.PAIRED): "labels: chosen is desirable, rejected undesirable",
        ("labelled", StoredKind.SCORED): f"labels: desirable above {_threshold(spec)}, "
        "undesirable below it (train.label_threshold)",
        ("grouped", StoredKind.PAIRED): "groups of two scored completions",
        ("grouped", StoredKind.UNPAIRED): "groups of as many scored completions as they hold",
        ("imitated", StoredKind.PAIRED): "what to imitate: the chosen completion of each",
        ("imitated", StoredKind.UNPAIRED): "what to imitate: their desirable completions",
        ("imitated", StoredKind.SCORED): "what to imitate: the best completion of each",
    }
    return ways.get((spec.kind, kind), "")


def _why(kind: StoredKind, spec: ReadSpec) -> str:
    if kind == StoredKind.UNPAIRED:
        return "nothing in them is desirable"
    if spec.kind == "labelled":
        return f"no score of theirs is above or below {_threshold(spec)}"
    gap = f"more than {spec.rules.min_gap:g} apart (train.min_score_gap)"
    return f"no two scores of theirs are {gap}"


def _threshold(spec: ReadSpec) -> str:
    threshold = spec.rules.threshold
    return f"the {threshold} of its row" if isinstance(threshold, str) else f"{threshold:g}"


NEAR = 6  # equal bytes, of the eight of a sketch
# Three groups of these bytes: if at most two bytes differ, at least one group is equal.
_BANDS = ((0, 24), (24, 24), (48, 16))  # first bit and bits
MOST_COMPARED = 256  # sketches with one group in common that a prompt is compared with
_COLUMNS = ("split_key", "prompt_sketch")


@dataclass(frozen=True)
class Overlap:
    """Counts of held-out prompts that are in the training data."""

    held_out: int  # different held-out prompts
    shared: int  # those that are in the training data as well
    near: int  # of the others, those that are nearly the same as one in the training data


def overlap(source: TrainSource, held_out_source: TrainSource) -> Overlap:
    """The overlap of prompts, by split keys and by sketches (see `count_near`).

    Rows that the method leaves out are counted too.
    """
    learned = _prompts(source, is_held_out=False)
    measured = _prompts(held_out_source, is_held_out=True).different()
    is_shared = np.isin(measured.keys, learned.keys)
    near = count_near(measured.sketches[~is_shared], learned.sketches)
    return Overlap(len(measured.keys), int(is_shared.sum()), near)


def count_near(sketches: NDArray[np.uint64], others: NDArray[np.uint64]) -> int:
    """The number of sketches with a near-duplicate among the others: six of eight equal bytes.

    The probability that a byte is equal is the Jaccard similarity of the prompts' sets of
    neighbouring word pairs. So at a similarity of nine tenths about 96 in 100 prompts are found, of
    two thirds 47, of one third 2, and of unrelated prompts none. A prompt is compared with at most
    `MOST_COMPARED` others of a band, so the number is a lower bound.
    """
    others = np.unique(others)
    left = sketches[~np.isin(sketches, others)]
    found = len(sketches) - len(left)
    for first_bit, bits in _BANDS:
        is_near = _near_in_band(left, others, first_bit, bits)
        found, left = found + int(is_near.sum()), left[~is_near]
    return found


def _near_in_band(
    sketches: NDArray[np.uint64], others: NDArray[np.uint64], first_bit: int, bits: int
) -> NDArray[np.bool_]:
    """Mask of the sketches that are near one of the others with the same bits in this band."""
    mask = np.uint64((1 << bits) - 1)
    bands = (others >> np.uint64(first_bit)) & mask
    order = np.argsort(bands, kind="stable")
    bands, others = bands[order], others[order]
    wanted = (sketches >> np.uint64(first_bit)) & mask
    start = np.searchsorted(bands, wanted, side="left")
    stop = np.minimum(np.searchsorted(bands, wanted, side="right"), start + MOST_COMPARED)
    is_near = np.zeros(len(sketches), dtype=np.bool_)
    left = np.flatnonzero(start < stop)
    while len(left):
        here = _equal_bytes(sketches[left], others[start[left]]) >= NEAR
        is_near[left[here]] = True
        start[left] += 1
        left = left[~here]
        left = left[start[left] < stop[left]]
    return is_near


def _equal_bytes(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.int64]:
    differing = (first ^ second).view(np.uint8).reshape(-1, 8)
    return np.asarray((differing == 0).sum(axis=1))


@dataclass(frozen=True)
class _Prompts:
    """The keys and sketches of prompts."""

    keys: NDArray[np.uint64]
    sketches: NDArray[np.uint64]

    def different(self) -> _Prompts:
        """The distinct prompts."""
        keys, firsts = np.unique(self.keys, return_index=True)
        return _Prompts(keys, self.sketches[firsts])


def _prompts(source: TrainSource, *, is_held_out: bool) -> _Prompts:
    """The prompts of all rows on one side of the split: 16 bytes a row."""
    keys, sketches = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for shard in source.manifest.shards:
        with naming_unit(shard.unit):
            table, _ = source.columns.read(source.folder, shard, _COLUMNS)
            found, sketched = (number_column(table, name) for name in _COLUMNS)
            here = held_out(found, source.spec.eval_fraction) == is_held_out
            keys.append(found[here])
            sketches.append(sketched[here])
    return _Prompts(np.concatenate(keys), np.concatenate(sketches))
