"""The rows of one rank, in memory from when they are read until their steps are run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.rows import Ragged, RowBlock, ScoredBlock
from ..storage.shard_columns import read_block, row_ids
from ..storage.shards import open_shard
from .as_read import as_read
from .index import naming_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .row_table import RowTable
    from .source import TrainSource


@dataclass(frozen=True)
class Piece:
    """Some rows of a row group."""

    numbers: NDArray[np.int64]  # (rows,) row numbers, in the order of the block
    block: ScoredBlock

    def keep(self, numbers: NDArray[np.int64]) -> Piece:
        """Those of its rows that are among `numbers`."""
        kept = np.flatnonzero(np.isin(self.numbers, numbers))
        return Piece(self.numbers[kept], self.block.take(kept))


@dataclass(frozen=True)
class Shelf:
    """Rows by their numbers, as the method reads them."""

    numbers: NDArray[np.int64]  # (rows,) ascending
    order: NDArray[np.int64]  # (rows,) where each stands in the block
    block: ScoredBlock
    row_ids: Sequence[str]  # (rows,) in the order of the block

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where these rows stand in the block."""
        return self.order[np.searchsorted(self.numbers, numbers)]


def read_pieces(source: TrainSource, table: RowTable, numbers: NDArray[np.int64]) -> list[Piece]:
    """Reads these rows of a table; a row group is let go as soon as its rows are taken."""
    groups = table.group_of(numbers)
    pieces = []
    for group in np.unique(groups).tolist():
        here = np.sort(numbers[groups == group])
        block = _read_group(source, group, table.places[here].astype(np.int64))
        pieces.append(Piece(here, block))
    return pieces


def fill_shelf(source: TrainSource, pieces: Sequence[Piece]) -> Shelf:
    """Puts pieces together; there may be none."""
    numbers = np.concatenate([np.empty(0, dtype=np.int64), *(piece.numbers for piece in pieces)])
    order = np.argsort(numbers)
    block = _joined(source, pieces)
    return Shelf(numbers[order], order, block, row_ids(block.rows).to_pylist())


def _read_group(source: TrainSource, group: int, rows: NDArray[np.int64]) -> ScoredBlock:
    """`rows` are places among what the row group is read as."""
    place = source.index.places[group]
    path = source.folder.data / source.manifest.shards[place.unit].file
    with naming_unit(place.unit), open_shard(path) as file:
        table = file.read_row_group(place.group, use_threads=False)
        block = read_block(table, source=str(path))
        return as_read(block, rows, reading=source.reading, source=str(path))


def _joined(source: TrainSource, pieces: Sequence[Piece]) -> ScoredBlock:
    blocks = [piece.block for piece in pieces] or [_no_rows(source)]
    kept = [block.token_logps for block in blocks if block.token_logps is not None]
    return ScoredBlock(
        RowBlock.concat([block.rows for block in blocks]),
        np.concatenate([block.logps for block in blocks]),
        Ragged.concat(kept) if kept else None,
    )


def _no_rows(source: TrainSource) -> ScoredBlock:
    """A block with the columns of the cache."""
    path = source.folder.data / source.manifest.shards[0].file
    with naming_unit(0), open_shard(path) as file:
        return read_block(file.schema_arrow.empty_table(), source=str(path))
