"""Reads inputs of judging and selection: a table of align, or a plain file of completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import polars as pl

from ...schemas.config import Config
from ...schemas.errors import UsageError, counted, logger
from ...schemas.rows import Record, Rejected
from ...schemas.samples import Drawing
from ...schemas.table_manifest import TableKind
from ...stages.data.cells import Wrapping
from ...stages.data.columns import common_shape, not_read
from ...stages.data.files import InputFile, digested, open_inputs, require_unchanged
from ...stages.data.readers import ending_of
from ...stages.data.records import read_records
from ...stages.data.shapes import Shape
from ...stages.select.plain_rows import samples_of
from ...stages.storage.tables import TableFolder, read_table
from ..jobs.object_inputs import with_local_inputs
from ..jobs.rejected_rows import RejectedRows, first_rejected


@dataclass(frozen=True)
class TableInput:
    """A table, what it was read from, and how many rows could not be read."""

    table: pl.DataFrame
    kind: str  # of a table of align; data: a plain file
    root: str  # its digest
    unusable: int = 0
    sampling: Drawing | None = None  # how its samples were drawn, as far as it is known

    @property
    def left_out(self) -> dict[str, int]:
        """The rows that could not be read, as a count of the table made of the others."""
        return {"unusable": self.unusable} if self.unusable else {}


def read_input(config: Config, named: str, kind: TableKind) -> TableInput:
    """The table in a folder of align, or the completions of a plain file."""
    folder = _folder_of(named, kind)
    if not ending_of(named) or folder.find():
        manifest, table = read_table(folder)
        return TableInput(table, kind, manifest.root, sampling=manifest.drawing)
    local = with_local_inputs(replace(config, data=replace(config.data, files=[named])))
    (file,) = open_inputs(local.data.files)
    return _read_plain(local, file, named, kind)


def _folder_of(named: str, kind: TableKind) -> TableFolder:
    """The folder that is named, or the one that the named table lies in."""
    parent, _, name = named.rstrip("/").rpartition("/")
    return TableFolder.at((parent or ".") if name == f"{kind}.parquet" else named, kind)


def _read_plain(config: Config, file: InputFile, named: str, kind: TableKind) -> TableInput:
    before = digested(file)
    shape = _shape(config, file, named)
    if shape.unread:
        logger.warning("%s: %s", named, not_read(shape.unread))
    rows = _Rows(file, shape)
    table = samples_of(rows.records())
    require_unchanged([file], [before])
    if rows.rejected:
        rejected = RejectedRows(
            counts=Counter(row.reason for row in rows.rejected),
            rows_in=rows.read,
            allowed=config.data.max_bad_frac,
        )
        rejected.require_few(first_rejected(rows.rejected, lambda _: named))
    if kind == "samples":
        table = table.drop("score")  # they are judged anew
    if rows.rejected:
        found = counted(len(rows.rejected), "rows")
        logger.warning("%s: %s cannot be used: %s", named, found, rows.rejected[0].detail)
    return TableInput(table, "data", before.sha256, len(rows.rejected))


def _shape(config: Config, file: InputFile, named: str) -> Shape:
    shape = common_shape([file], config.data.map)
    if shape.declared.kind in ("pair", "label"):
        raise UsageError(
            f"{named} holds {shape.name} rows: nothing is left to judge or to select. Give it to "
            "align precompute-ref."
        )
    return replace(shape, wrap=Wrapping.of(config.data.wrap))


class _Rows:
    """The rows of a file, counted while they are read."""

    def __init__(self, file: InputFile, shape: Shape) -> None:
        self._file, self._shape = file, shape
        self.read = 0
        self.rejected: list[Rejected] = []

    def records(self) -> Iterator[Record]:
        """The usable records."""
        for one in read_records([self._file], self._shape):
            self.read += 1
            if isinstance(one, Rejected):
                self.rejected.append(one)
            else:
                yield one
