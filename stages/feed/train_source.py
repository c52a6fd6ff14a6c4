"""Opens finished caches for a method: the rows that it reads, and notes on the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import Manifest, Shard, StoredKind
from ...schemas.columns import number_column
from ...schemas.errors import CorruptionError, UsageError
from ...schemas.methods import Labels, RowKind
from ..storage.cache import Cache
from ..storage.shards import open_shard
from .cache_index import SCORES, RowTable, ShardColumns, columns_of, read_table
from .select import CONVERSIONS, KindCounts, ReadSpec, held_out


@dataclass(frozen=True)
class TrainSource:
    """A cache and the lengths of its rows; the loader reads their tokens."""

    folder: Cache
    manifest: Manifest
    spec: ReadSpec
    columns: ShardColumns
    row_groups: tuple[tuple[Shard, int], ...]  # by the row group numbers in both tables
    train: RowTable
    held_out: RowTable
    kinds: dict[StoredKind, KindCounts]  # of the cache, read or not
    labels: Labels  # of the completions in an epoch
    num_partners: int  # KL completions per completion in the cache
    longest: int  # most tokens of a prompt and one completion, as the method reads them

    @property
    def train_rows(self) -> int:
        """The number of training rows."""
        return len(self.train)

    @property
    def eval_rows(self) -> int:
        """The number of held-out rows."""
        return len(self.held_out)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of stored rows and resulting rows, by name."""
        return {
            f"rows.{kind.name.lower()}.{name}": count
            for kind, counts in self.kinds.items()
            for name, count in vars(counts).items()
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the conversion of each kind of rows, and on rows left out."""
        return tuple(_notes(self))


def open_source(
    folder: Cache, manifest: Manifest, spec: ReadSpec, columns: ShardColumns
) -> TrainSource:
    """The source of a cache, with its rows indexed; eval_fraction 1 holds out every row."""
    if not 0 <= spec.eval_fraction <= 1:
        raise UsageError(f"eval_fraction is {spec.eval_fraction}; it must be between 0 and 1.")
    if spec.columns and manifest.shards:
        with open_shard(folder.shard(manifest.shards[0])) as file:
            there = file.schema_arrow.names
        for name in spec.columns:
            if name not in there:
                raise UsageError(
                    f"{folder.root} has no column {name!r}, which method.margin or "
                    "method.row_weight names. Make one with `align precompute-ref … "
                    f"--set data.carry=[{name}] --output OTHER`: its scores are reused."
                )
    weights = _file_weights(manifest, spec)
    files = [f"{entry.identity:016x}" for entry in manifest.inputs] if weights else []

    row_groups, train, kept = list[tuple[Shard, int]](), list[RowTable](), list[RowTable]()
    kinds, missing = dict[StoredKind, KindCounts](), Counter[str]()
    file_of = list[NDArray[np.int16]]()  # of training rows
    labels = np.zeros((2, max(1, len(weights))))  # good and bad completions of each file
    num_partners, longest = 0, 0
    for number, shard in enumerate(manifest.shards):  # an empty key range has no shard
        table, sizes = columns.read(folder, shard, columns_of(spec))
        rows = read_table(table, sizes, spec, str(folder.root), files)
        if number and rows.num_partners != num_partners:
            raise CorruptionError(
                f"it has {rows.num_partners} KL completions per completion, unlike the shards "
                "before it. Make the cache again."
            )
        num_partners, longest = rows.num_partners, max(longest, rows.longest)
        row_groups += [(shard, group) for group in range(len(sizes))]
        is_learned = ~rows.is_held_out
        train.append(rows.table.keep(is_learned))
        kept.append(rows.table.keep(rows.is_held_out))
        file_of.append(rows.files[is_learned])
        for label, counts in enumerate((rows.num_good, rows.num_bad)):
            count = labels.shape[1]
            labels[label] += np.bincount(file_of[-1], counts[is_learned], minlength=count)
        for kind, of_kind in rows.kinds.items():
            kinds[kind] = kinds.get(kind, KindCounts()) + of_kind
        missing.update(rows.missing)

    read = num_partners if spec.mismatched else 0
    learned = RowTable.concat(train, num_partners=read)
    draws_per_row = np.ones(labels.shape[1])  # of each file
    if weights and file_of:
        from .file_weights import Draws  # noqa: PLC0415 - most trainings weigh no file

        draws = Draws.of(np.concatenate(file_of), weights)
        learned = replace(learned, draws=draws)
        # Labels are counted per draw: all rows of a file are drawn equally often.
        in_file = np.bincount(draws.file_of, minlength=len(weights))
        draws_per_row = np.array(draws.per_epoch) / np.maximum(in_file, 1)
    source = TrainSource(
        folder,
        manifest,
        spec,
        columns,
        row_groups=tuple(row_groups),
        train=learned,
        held_out=RowTable.concat(kept, num_partners=read),
        kinds=kinds,
        labels=Labels(*map(round, (labels @ draws_per_row).tolist())),
        num_partners=num_partners,
        longest=longest,
    )
    _require_rows(source, missing)
    return source


def held_out_sources(
    source: TrainSource, caches: Mapping[str, tuple[Cache, Manifest]]
) -> dict[str, TrainSource]:
    """The held-out rows by the name of their set: of other caches, or of the source's own."""
    spec = replace(source.spec, eval_fraction=1.0, file_weights={})
    found = {name: open_source(*one, spec, source.columns) for name, one in caches.items()}
    return found or {"": source}


def _file_weights(manifest: Manifest, spec: ReadSpec) -> tuple[float, ...]:
    if not spec.file_weights:
        return ()
    from .file_weights import weights_of  # noqa: PLC0415 - as above

    return weights_of(manifest.inputs, spec.file_weights)


def _require_rows(source: TrainSource, missing: Counter[str]) -> None:
    """Refuses a cache without rows to learn from, or without values that the method reads."""
    root, spec = source.folder.root, source.spec
    if source.train_rows + source.eval_rows == 0:
        stored = source.kinds
        found = " and ".join(f"{stored[kind].stored:,} {STORED[kind]}" for kind in sorted(stored))
        raise UsageError(
            f"The method is {spec.kind}: it reads {WANTED[spec.kind]}. {root} has none of them; "
            f"its rows are: {found or 'none at all'}. {' '.join(source.notes)} Unpaired rows are "
            "for methods without pairs, such as kto; `align methods` lists what each method reads."
        )
    if source.train_rows == 0 and spec.eval_fraction < 1:
        raise UsageError(
            f"All {source.eval_rows:,} rows of {root} are held out for evaluation. "
            "Lower train.eval_fraction, or add rows with other prompts."
        )
    if source.train_rows and not source.train.rows_per_epoch:
        raise UsageError(
            f"train.file_weights leaves no row of {root} to learn from. Give a file more weight."
        )
    if missing[SCORES]:
        raise UsageError(
            f"The method reads scores, but {missing[SCORES]:,} rows of {root} have a completion "
            "without one. Score the data with `align score`, or give scores in the column 'scores' "
            "(for pairs: 'chosen_score' and 'rejected_score'), and make another cache: log-probs "
            "are reused."
        )
    for name in spec.columns:
        if missing[name]:
            raise UsageError(
                f"{missing[name]:,} rows of {root} have no number in the column {name!r}, which "
                "the method reads. Fill it in the data, and make another cache."
            )
    if spec.mismatched and not source.num_partners:
        raise UsageError(
            f"{root} has no KL completions, which this method needs. Make another cache with "
            "`align precompute-ref … --kl-pairs 1 --output OTHER`: its scores are reused."
        )


WANTED: dict[RowKind, str] = {
    "paired": "rows with one chosen and one rejected completion, or scored ones",
    "labelled": "completions with a label, pairs of them, or scored ones",
    "grouped": "groups of scored completions, or pairs and labels as such",
    "imitated": "chosen, desirable or best completions",
}
STORED = {
    StoredKind.PAIRED: "paired (chosen, rejected)",
    StoredKind.UNPAIRED: "unpaired (a completion and its label)",
    StoredKind.SCORED: "scored (completions and their scores)",
}
BECOME: dict[tuple[RowKind, StoredKind], str] = {  # the conversion of each kind of rows
    ("paired", StoredKind.SCORED): "{made:,} pairs: {which} (train.pairs_from_scores)",
    ("labelled", StoredKind.PAIRED): "labels: chosen is desirable, rejected undesirable",
    ("labelled", StoredKind.SCORED): "labels: desirable above {threshold}, undesirable below it "
    "(train.label_threshold)",
    ("grouped", StoredKind.PAIRED): "groups of two scored completions",
    ("grouped", StoredKind.UNPAIRED): "groups of as many scored completions as they hold",
    ("imitated", StoredKind.PAIRED): "completions to imitate: the chosen one of each",
    ("imitated", StoredKind.UNPAIRED): "completions to imitate: the desirable ones",
    ("imitated", StoredKind.SCORED): "completions to imitate: the best one of each",
}


def _notes(source: TrainSource) -> Iterator[str]:
    spec, train = source.spec, source.train
    for kind, counts in sorted(source.kinds.items()):
        if kind not in CONVERSIONS[spec.kind]:
            yield (
                f"{counts.stored:,} rows are not read: they are {STORED[kind]}, and the method "
                f"reads {WANTED[spec.kind]}."
            )
        elif become := "; ".join(_conversion(kind, counts, spec)):
            yield f"{counts.stored:,} {kind.name.lower()} rows: {become}."
    if len(train) and spec.eval_fraction and not source.eval_rows:
        yield f"eval_fraction {spec.eval_fraction} holds out none of {len(train):,} rows."
    if spec.label_shares != (1.0, 1.0):
        desirable, undesirable = spec.label_shares
        yield (
            f"{source.labels.desirable:,} desirable and {source.labels.undesirable:,} undesirable "
            f"completions remain after train.desirable_share {desirable:g} and "
            f"train.undesirable_share {undesirable:g} of the prompts."
        )
    if (draws := train.draws) is not None:
        in_file = np.bincount(draws.file_of, minlength=len(draws.per_epoch)).tolist()
        inputs = source.manifest.inputs
        for entry, count, drawn in zip(inputs, in_file, draws.per_epoch, strict=True):
            often = f"{drawn:,} draws an epoch from {count:,} rows"
            yield f"{entry.name}: {often} (train.file_weights)."


def _conversion(kind: StoredKind, counts: KindCounts, spec: ReadSpec) -> Iterator[str]:
    """The conversion of a kind of rows, and how many are left out and why."""
    rules, is_scored = spec.rules, kind == StoredKind.SCORED
    gap = f"more than {rules.min_gap:g} apart"
    is_of_row = isinstance(rules.threshold, str)
    threshold = f"the {rules.threshold} of its row" if is_of_row else f"{rules.threshold:g}"
    if counts.read and (become := BECOME.get((spec.kind, kind))):
        which = "the best against the worst" if rules.pairs == "best_worst" else f"all {gap}"
        read_as = become.format(made=counts.made, which=which, threshold=threshold)
        yield f"{counts.read:,} read as {read_as}"
    left_out = counts.stored - counts.read
    if spec.kind == "grouped":
        if counts.unscored and not is_scored:
            yield (
                f"{counts.unscored:,} have no scores: chosen and desirable completions get 1, "
                f"others {rules.bad_score:g}"
            )
    elif is_scored and counts.unscored:
        yield f"{counts.unscored:,} left out: they have completions without scores (`align score`)"
        left_out -= counts.unscored
    if left_out and kind == StoredKind.UNPAIRED:
        yield f"{left_out:,} left out: they have no desirable completion"
    elif left_out and spec.kind == "labelled":
        yield f"{left_out:,} left out: all their scores equal {threshold}"
    elif left_out:
        yield f"{left_out:,} left out: no two scores are {gap} (train.min_score_gap)"
    if counts.left_out and is_scored and spec.kind == "labelled":
        yield f"{counts.left_out:,} completions get no label: their score equals {threshold}"


def overlap(source: TrainSource, held_out_source: TrainSource) -> tuple[int, int]:
    """The number of different held-out prompts, and how many of them are trained on as well.

    Prompts are compared by their split keys. Rows that the method leaves out count too.
    """
    learned = _split_keys(source, is_held_out=False)
    measured = np.unique(_split_keys(held_out_source, is_held_out=True))
    return len(measured), int(np.isin(measured, learned).sum())


def _split_keys(source: TrainSource, *, is_held_out: bool) -> NDArray[np.uint64]:
    """The split keys of all training rows, or of all held-out rows."""
    keys = [np.empty(0, np.uint64)]
    for shard in source.manifest.shards:
        table, _ = source.columns.read(source.folder, shard, ("split_key",))
        found = number_column(table, "split_key")
        keys.append(found[held_out(found, source.spec.eval_fraction) == is_held_out])
    return np.concatenate(keys)
