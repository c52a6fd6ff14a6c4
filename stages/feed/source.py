"""A finished cache, opened for one kind of method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.errors import UsageError
from ...schemas.methods import Labels
from .index import Index, Reading, build_index
from .selection import READS, StoredKind

if TYPE_CHECKING:
    from ...schemas.manifest import Manifest
    from ...schemas.methods import RowKind
    from ..storage.layout import CacheFolder

_WANTED = {
    "paired": "rows with one chosen and one rejected completion",
    "labelled": "completions with a label, or pairs of them",
}
_STORED = {
    StoredKind.PAIRED: "paired (chosen, rejected)",
    StoredKind.UNPAIRED: "unpaired (a completion and its label)",
    StoredKind.SCORED: "scored (completions and their scores)",
}
_SERVE = {
    StoredKind.PAIRED: "Paired rows serve every method.",
    StoredKind.UNPAIRED: "Unpaired rows serve methods that read labels, such as kto.",
    StoredKind.SCORED: "No method reads scored rows yet.",
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
        branches = int(self.index.train.branch_offsets[-1])
        return Labels(self.index.desirable, branches - self.index.desirable)


def open_source(
    folder: CacheFolder,
    manifest: Manifest,
    *,
    rows: RowKind,
    mismatched: bool,
    eval_fraction: float,
    checks_bytes: bool,
) -> TrainSource:
    """Reads the lengths of all rows; `eval_fraction` 1 makes a source for evaluation only.

    One process per machine is enough to check every byte; the others need not.
    """
    if not 0 <= eval_fraction <= 1:
        raise UsageError(f"eval_fraction is {eval_fraction}; it must lie between 0 and 1.")
    reading = Reading(rows, mismatched, eval_fraction)
    index = build_index(folder, manifest, reading, checks_bytes=checks_bytes)
    source = TrainSource(folder, manifest, reading, index, _notes(index, reading))
    _require_rows(source)
    if mismatched and not index.levels:
        raise UsageError(
            f"{folder.root} holds no mismatched completions, and this method needs them. "
            "Run `align precompute-ref` again with --kl-pairs 1; nothing is scored twice."
        )
    return source


def _require_rows(source: TrainSource) -> None:
    root, kind = source.folder.root, source.reading.kind
    if source.train_rows + source.eval_rows == 0:
        stored = source.index.rows_of_kind
        held = " and ".join(f"{stored[kind]:,} {_STORED[kind]}" for kind in sorted(stored))
        serve = "".join(f"{_SERVE[kind]} " for kind in sorted(stored))
        raise UsageError(
            f"The method is {kind}: it reads {_WANTED[kind]}. Of them {root} holds none; "
            f"its rows are: {held or 'none at all'}. "
            f"{serve}`align methods` tells the methods apart."
        )
    if source.train_rows == 0 and source.reading.eval_fraction < 1:
        raise UsageError(
            f"All {source.eval_rows:,} rows of {root} are held out for evaluation. "
            "Lower train.eval_fraction, or add rows with other prompts."
        )


def _notes(index: Index, reading: Reading) -> tuple[str, ...]:
    total = sum(index.rows_of_kind.values())
    notes = [
        f"{count:,} of {total:,} rows are not read: they are {_STORED[kind]}, "
        f"and the method reads {_WANTED[reading.kind]}."
        for kind, count in sorted(index.rows_of_kind.items())
        if kind not in READS[reading.kind]
    ]
    if reading.eval_fraction and not len(index.held_out):
        notes.append(f"eval_fraction {reading.eval_fraction} holds out none of {total:,} rows.")
    return tuple(notes)
