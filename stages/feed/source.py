"""A finished cache, opened for one kind of method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.errors import UsageError
from ...schemas.methods import Labels
from ..storage.shards import open_shard
from .conversions import StoredKind
from .index import SCORES, Index, build_index
from .notes import STORED, WANTED, told

if TYPE_CHECKING:
    from ...schemas.cache import Manifest
    from ..storage.cache_folder import CacheFolder
    from .reading import Reading

_SERVE = {
    StoredKind.PAIRED: "Paired rows serve every method.",
    StoredKind.UNPAIRED: "Unpaired rows serve methods that read no pairs, such as kto.",
    StoredKind.SCORED: "Scored rows serve every method once their scores tell them apart.",
}


@dataclass(frozen=True)
class TrainSource:
    """Which rows there are, and where; their tokens are read when their turn comes."""

    folder: CacheFolder
    manifest: Manifest
    reading: Reading
    index: Index
    notes: tuple[str, ...]  # what a person should know

    @property
    def train_rows(self) -> int:
        """Rows that are learned from."""
        return len(self.index.train)

    @property
    def eval_rows(self) -> int:
        """Rows that are held out."""
        return len(self.index.held_out)

    @property
    def levels(self) -> int:
        """Mismatched partners of each completion in the cache; 0: none."""
        return self.index.levels

    @property
    def labels(self) -> Labels:
        """How many branches of each label the training rows hold."""
        return Labels(self.index.desirable, self.index.undesirable)

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each kind of data and what is made of them, by names fit for a record."""
        return {
            f"rows.{kind.name.lower()}.{name}": count
            for kind, counts in self.index.kinds.items()
            for name, count in vars(counts).items()
        }


def open_source(
    folder: CacheFolder, manifest: Manifest, reading: Reading, *, checks_bytes: bool
) -> TrainSource:
    """Reads the lengths of all rows; `eval_fraction` 1 makes a source for evaluation only.

    One process per machine is enough to check every byte; the others need not.
    """
    fraction = reading.eval_fraction
    if not 0 <= fraction <= 1:
        raise UsageError(f"eval_fraction is {fraction}; it must lie between 0 and 1.")
    _require_columns(folder, manifest, reading)
    index = build_index(folder, manifest, reading, checks_bytes=checks_bytes)
    source = TrainSource(folder, manifest, reading, index, _notes(index, reading))
    _require_rows(source)
    _require_numbers(source)
    if reading.mismatched and not index.levels:
        raise UsageError(
            f"{folder.root} holds no mismatched completions, and this method needs them. "
            "Run `align precompute-ref` again with --kl-pairs 1; nothing is scored twice."
        )
    return source


def _require_rows(source: TrainSource) -> None:
    root, kind = source.folder.root, source.reading.kind
    if source.train_rows + source.eval_rows == 0:
        stored = source.index.kinds
        held = " and ".join(f"{stored[kind].stored:,} {STORED[kind]}" for kind in sorted(stored))
        serve = "".join(f"{_SERVE[kind]} " for kind in sorted(stored))
        why = "".join(f"{note} " for note in source.notes)
        raise UsageError(
            f"The method is {kind}: it reads {WANTED[kind]}. Of them {root} holds none; "
            f"its rows are: {held or 'none at all'}. "
            f"{why}{serve}`align methods` tells the methods apart."
        )
    if source.train_rows == 0 and source.reading.eval_fraction < 1:
        raise UsageError(
            f"All {source.eval_rows:,} rows of {root} are held out for evaluation. "
            "Lower train.eval_fraction, or add rows with other prompts."
        )


def _require_columns(folder: CacheFolder, manifest: Manifest, reading: Reading) -> None:
    """Every shard of a cache has the columns of the first one."""
    if not (reading.columns and manifest.shards):
        return
    with open_shard(folder.data / manifest.shards[0].file) as file:
        there = file.schema_arrow.names
    for name in reading.columns:
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
            "(of pairs: 'chosen_score' and 'rejected_score'), and make the cache anew; nothing "
            "is scored by the reference twice."
        )
    for name in source.reading.columns:
        if missing[name]:
            raise UsageError(
                f"{missing[name]:,} rows of {root} have no number in their column {name!r}, which "
                "the method reads. Fill it in the data, and make the cache anew."
            )


def _notes(index: Index, reading: Reading) -> tuple[str, ...]:
    notes = list(told(index.kinds, reading))
    rows = len(index.train)
    if rows and reading.eval_fraction and not len(index.held_out):
        notes.append(f"eval_fraction {reading.eval_fraction} holds out none of {rows:,} rows.")
    return tuple(notes)
