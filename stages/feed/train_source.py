"""Finished caches, opened for one kind of method, with notes on their rows.

The notes report conversions, rows that are left out, and prompts that are in both the training and
the held-out rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import Manifest, StoredKind
from ...schemas.columns import number_column
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
            "Make another with `align precompute-ref … --kl-pairs 1 --output OTHER`; nothing is "
            "scored twice."
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
            "(of pairs: 'chosen_score' and 'rejected_score'), and make another cache; nothing is "
            "scored by the reference twice."
        )
    for name in source.spec.columns:
        if missing[name]:
            raise UsageError(
                f"{missing[name]:,} rows of {root} have no number in their column {name!r}, which "
                "the method reads. Fill it in the data, and make another cache."
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


@dataclass(frozen=True)
class Overlap:
    """Counts of held-out prompts that are in the training data."""

    held_out: int  # different held-out prompts
    shared: int  # those that are in the training data as well


def overlap(source: TrainSource, held_out_source: TrainSource) -> Overlap:
    """The overlap of prompts, by split keys; rows that the method leaves out are counted too."""
    learned = _split_keys(source, is_held_out=False)
    measured = np.unique(_split_keys(held_out_source, is_held_out=True))
    return Overlap(len(measured), int(np.isin(measured, learned).sum()))


def _split_keys(source: TrainSource, *, is_held_out: bool) -> NDArray[np.uint64]:
    """The keys of all rows on one side of the split: 8 bytes a row."""
    keys = [np.empty(0, np.uint64)]
    for shard in source.manifest.shards:
        with naming_unit(shard.unit):
            table, _ = source.columns.read(source.folder, shard, ("split_key",))
            found = number_column(table, "split_key")
            keys.append(found[held_out(found, source.spec.eval_fraction) == is_held_out])
    return np.concatenate(keys)
