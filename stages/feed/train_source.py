"""Finished caches, opened for one kind of method, with notes on their rows.

The notes report conversions, rows that are left out, and prompts that are in both the training and
the held-out rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import Manifest, StoredKind
from ...schemas.columns import number_column
from ...schemas.errors import UsageError
from ...schemas.methods import Labels, RowKind
from ..storage.cache import Cache
from ..storage.shards import open_shard
from .cache_index import SCORES, Index, ShardColumns, build_index
from .conversions import CONVERSIONS, ReadSpec
from .file_weights import SETTING
from .prompt_split import held_out
from .row_selection import KindCounts


@dataclass(frozen=True)
class TrainSource:
    """A cache and the index of its rows; tokens are read when a step needs them."""

    folder: Cache
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
    folder: Cache, manifest: Manifest, spec: ReadSpec, columns: ShardColumns
) -> TrainSource:
    """The source of a cache, with its rows indexed; `eval_fraction` 1 is for evaluation only."""
    fraction = spec.eval_fraction
    if not 0 <= fraction <= 1:
        raise UsageError(f"eval_fraction is {fraction}; it must be between 0 and 1.")
    _require_columns(folder, manifest, spec)
    index = build_index(folder, manifest, spec, columns)
    notes = tuple(_notes(index, manifest, spec))
    source = TrainSource(folder, manifest, spec, columns, index, notes)
    _require_rows(source)
    _require_numbers(source)
    if spec.mismatched and not index.num_partners:
        raise UsageError(
            f"{folder.root} holds no mismatched completions, and this method needs them. "
            "Make another with `align precompute-ref … --kl-pairs 1 --output OTHER`; nothing is "
            "scored twice."
        )
    return source


def _require_rows(source: TrainSource) -> None:
    root, kind = source.folder.root, source.spec.kind
    if source.train_rows + source.eval_rows == 0:
        stored = source.index.kinds
        held = " and ".join(f"{stored[kind].stored:,} {STORED[kind]}" for kind in sorted(stored))
        raise UsageError(
            f"The method is {kind}: it reads {WANTED[kind]}. Of them {root} holds none; its rows "
            f"are: {held or 'none at all'}. {' '.join(source.notes)} Unpaired rows serve methods "
            "that read no pairs, such as kto; `align methods` shows what each method reads."
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


def _require_columns(folder: Cache, manifest: Manifest, spec: ReadSpec) -> None:
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
            "(of pairs: 'chosen_score' and 'rejected_score'), and make another cache; nothing is "
            "scored by the reference twice."
        )
    for name in source.spec.columns:
        if missing[name]:
            raise UsageError(
                f"{missing[name]:,} rows of {root} have no number in their column {name!r}, which "
                "the method reads. Fill it in the data, and make another cache."
            )


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
BECOME: dict[tuple[RowKind, StoredKind], str] = {  # what rows of a kind are converted to
    ("paired", StoredKind.SCORED): "{made:,} pairs: {which} (train.pairs_from_scores)",
    ("labelled", StoredKind.PAIRED): "labels: chosen is desirable, rejected undesirable",
    ("labelled", StoredKind.SCORED): "labels: desirable above {threshold}, undesirable below it "
    "(train.label_threshold)",
    ("grouped", StoredKind.PAIRED): "groups of two scored completions",
    ("grouped", StoredKind.UNPAIRED): "groups of as many scored completions as they hold",
    ("imitated", StoredKind.PAIRED): "what to imitate: the chosen completion of each",
    ("imitated", StoredKind.UNPAIRED): "what to imitate: their desirable completions",
    ("imitated", StoredKind.SCORED): "what to imitate: the best completion of each",
}


def _notes(index: Index, manifest: Manifest, spec: ReadSpec) -> Iterator[str]:
    """What becomes of the rows of each kind, and what is left out."""
    total = sum(counts.stored for counts in index.kinds.values())
    for kind, counts in sorted(index.kinds.items()):
        if kind in CONVERSIONS[spec.kind]:
            yield from _conversion_notes(kind, counts, spec)
        else:
            yield (
                f"{counts.stored:,} of {total:,} rows are not read: they are {STORED[kind]}, "
                f"and the method reads {WANTED[spec.kind]}."
            )
    rows = len(index.train)
    if rows and spec.eval_fraction and not len(index.held_out):
        yield f"eval_fraction {spec.eval_fraction} holds out none of {rows:,} rows."
    if not (shares := spec.label_shares).are_whole:
        yield (
            f"{index.desirable:,} desirable and {index.undesirable:,} undesirable completions are "
            f"left by train.desirable_share {shares.desirable:g} and train.undesirable_share "
            f"{shares.undesirable:g} of the prompts."
        )
    if (draws := index.train.draws) is not None:
        in_file = np.bincount(draws.file_of, minlength=len(draws.per_epoch)).tolist()
        for entry, count, drawn in zip(manifest.inputs, in_file, draws.per_epoch, strict=True):
            yield f"{entry.name}: {drawn:,} draws an epoch from {count:,} rows ({SETTING})."


def _conversion_notes(kind: StoredKind, counts: KindCounts, spec: ReadSpec) -> Iterator[str]:
    name, rules, is_scored = kind.name.lower(), spec.rules, kind == StoredKind.SCORED
    gap = f"more than {rules.min_gap:g} apart"
    is_of_row = isinstance(rules.threshold, str)
    threshold = f"the {rules.threshold} of its row" if is_of_row else f"{rules.threshold:g}"
    if counts.read and (become := BECOME.get((spec.kind, kind))):
        which = "the best against the worst" if rules.pairs == "best_worst" else f"all {gap}"
        said = become.format(made=counts.made, which=which, threshold=threshold)
        yield f"{counts.read:,} {name} rows are read as {said}."
    if counts.unscored and spec.kind == "grouped" and not is_scored:
        yield (
            f"{counts.unscored:,} {name} rows lack scores of their own: chosen and desirable "
            f"completions get 1, others {rules.bad_score:g}."
        )
    unscored = counts.unscored if is_scored and spec.kind != "grouped" else 0
    if unscored:
        yield (
            f"{unscored:,} of {counts.stored:,} {name} rows are left out: a completion of each "
            "has no score. `align score` gives them some."
        )
    if dropped := counts.stored - counts.read - unscored:
        why = f"no two scores of theirs are {gap} (train.min_score_gap)"
        if kind == StoredKind.UNPAIRED:
            why = "nothing in them is desirable"
        elif spec.kind == "labelled":
            why = f"no score of theirs is above or below {threshold}"
        yield f"{dropped:,} of {counts.stored:,} {name} rows are left out: {why}."
    if counts.left_out and is_scored and spec.kind == "labelled":
        yield (
            f"{counts.left_out:,} completions of scored rows get no label: their score is "
            f"{threshold} itself (train.label_threshold)."
        )


def overlap(source: TrainSource, held_out_source: TrainSource) -> tuple[int, int]:
    """How many different prompts are held out, and how many of them are trained on as well.

    Prompts are compared by their split keys; those of rows that the method leaves out count too.
    """
    learned = _split_keys(source, is_held_out=False)
    measured = np.unique(_split_keys(held_out_source, is_held_out=True))
    return len(measured), int(np.isin(measured, learned).sum())


def _split_keys(source: TrainSource, *, is_held_out: bool) -> NDArray[np.uint64]:
    """The keys of all rows on one side of the split: 8 bytes a row."""
    keys = [np.empty(0, np.uint64)]
    for shard in source.manifest.shards:
        table, _ = source.columns.read(source.folder, shard, ("split_key",))
        found = number_column(table, "split_key")
        keys.append(found[held_out(found, source.spec.eval_fraction) == is_held_out])
    return np.concatenate(keys)
