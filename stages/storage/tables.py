"""Tables of samples, judged samples and selected rows: one Parquet file that holds its settings.

samples.parquet   or judged.parquet, selected.parquet: stage 1 reads the folder, or the file
_align/           answers that were paid for, see answers.py

The manifest of a table is in the file's own metadata, under the key `align`: what the table was
made from, its settings and counts, and the sha256 of all bytes before the footer. So one rename
publishes both. Row groups are written and read one at a time.
"""

from __future__ import annotations

import filecmp
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import CorruptionError, UsageError, damaged
from ...schemas.json_codec import CodecError, digest, from_signed_json, to_signed_json
from ...schemas.samples import Drawing
from ...schemas.table_manifest import TABLE_FORMAT, TableKind, TableManifest
from .bucket.objects import Location, location
from .cache.cache_folder import OutputFolder
from .copies import fetch_folder
from .disk import fs
from .store import Store, store_of

if TYPE_CHECKING:
    import polars as pl

NAMES: dict[TableKind, str] = {
    "samples": "samples",
    "judged": "judged samples",
    "selected": "selected rows",
}
COMMANDS = {"samples": "align sample", "judged": "align judge", "selected": "align select"}
KEY = b"align"  # of the manifest in the file's metadata
ROWS = 1 << 16  # of a row group
_REMEDY = "Run the command that made it again."
_DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)


@dataclass(frozen=True)
class TableFolder:
    """The folder of one table."""

    root: Location
    kind: TableKind

    when_locked = "Wait for it, or choose another --output."

    @staticmethod
    def at(text: str, kind: TableKind) -> TableFolder:
        """The folder that a setting names."""
        return TableFolder(location(text), kind)

    @property
    def store(self) -> Store[Location]:
        """The operations on its files."""
        return store_of(self.root)

    @property
    def file(self) -> Location:
        """The table."""
        return self.root / f"{self.kind}.parquet"

    def answers(self, named: str) -> Path:
        """The folder of answers, on a disk: one that a setting names, or one of the table."""
        return Path(named) if named else self.local / "_align" / "answers"

    @property
    def local(self) -> Path:
        """The folder of what needs a disk: that of the table, or one beside the store."""
        return self.store.work_folder(self.root)

    @property
    def lock(self) -> Path:
        """Held by the owner of the folder, among the processes of a machine."""
        return self.local / "_align" / "LOCK"

    def prepare(self) -> None:
        """Makes the folder; refuses one that holds something else."""
        if self.store.has_folders:
            OutputFolder(self.local, self.kind).prepare()
        else:
            self._refuse_others()
        fs.drop_drafts(self.local / self.file.name)

    def find(self) -> TableManifest | None:
        """The manifest of the table, if there is one; it has to be of this kind."""
        if not self.file.is_file():
            self._refuse_others()
            return None
        found = _stored(_on_disk(self.file))
        if found and found.kind != self.kind:
            raise self._of_another_kind(found.kind)
        return found

    def publish(
        self,
        table: pl.DataFrame,
        *,
        made_from: Mapping[str, str],
        settings: Mapping[str, Any],
        counts: Mapping[str, int],
        sampling: Drawing | None = None,
    ) -> TableManifest:
        """Writes the table with its manifest, in place of another; nothing if it is there."""
        unsigned = TableManifest(
            format_version=TABLE_FORMAT,
            root="",
            kind=self.kind,
            made_from=dict(made_from),
            settings=dict(settings),
            counts=dict(counts),
            rows=table.height,
            columns={},
            bytes=0,
            sha256="",
            sampling=sampling,
        )
        with fs.locked_draft(self.local / self.file.name) as (draft, sink):
            manifest = _write(draft, sink, table, unsigned)
            there = self.file if isinstance(self.file, Path) and self.file.is_file() else None
            if there and filecmp.cmp(draft, there, shallow=False):
                fs.unlink(draft)
                # Whoever wrote the table may have died before its name was durable.
                fs.fsync_folder(there.parent)
            else:
                self.store.install(draft, self.file)
        return manifest

    def _refuse_others(self) -> None:
        for kind in NAMES:
            if kind != self.kind and (self.root / f"{kind}.parquet").is_file():
                raise self._of_another_kind(kind)

    def _of_another_kind(self, kind: TableKind) -> UsageError:
        return UsageError(
            f"{self.root} holds {NAMES[kind]}, not {NAMES[self.kind]}. Name a folder that "
            f"`{COMMANDS[self.kind]}` made."
        )


def read_manifest(folder: TableFolder) -> TableManifest:
    """The manifest of a finished table."""
    if found := folder.find():
        return found
    raise UsageError(
        f"{folder.root} holds no finished table of {NAMES[folder.kind]} ({folder.file.name}). "
        f"Run `{COMMANDS[folder.kind]}` to its end, or name another folder."
    )


def drawing_of(path: Path) -> Drawing | None:
    """How the samples in a data file were drawn, if it is a table of align."""
    try:
        manifest = _stored(path) if path.suffix == ".parquet" else None
    except CorruptionError:  # it is data all the same
        return None
    return manifest.drawing if manifest else None


def read_table(folder: TableFolder) -> tuple[TableManifest, pl.DataFrame]:
    """A finished table, its bytes compared with the manifest."""
    import polars as pl  # noqa: PLC0415 - a command that reads no table need not wait for it

    manifest, path = read_manifest(folder), _on_disk(folder.file)
    if _sha256_of(path, manifest.bytes) != manifest.sha256:
        raise damaged(folder.file, "its rows are not those that were written", _REMEDY)
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            schema = file.schema_arrow
            if (_columns(schema), file.metadata.num_rows) != (manifest.columns, manifest.rows):
                raise damaged(folder.file, "its footer is not what was written", _REMEDY)
            groups = map(file.read_row_group, range(file.num_row_groups))
            pieces = [pl.from_arrow(one) for one in (schema.empty_table(), *groups)]
    except _DAMAGE as error:
        raise damaged(folder.file, str(error).partition("\n")[0], _REMEDY) from error
    return manifest, pl.concat(cast("list[pl.DataFrame]", pieces))


def _write(
    path: Path, sink: io.BufferedWriter, table: pl.DataFrame, manifest: TableManifest
) -> TableManifest:
    """Writes a table, then its manifest into the footer; the same bytes for the same rows."""
    schema = table.clear().to_arrow().schema
    with pq.ParquetWriter(sink, schema, compression="zstd", write_statistics=False) as writer:
        for start in range(0, table.height, ROWS):
            writer.write_table(table.slice(start, ROWS).to_arrow(), row_group_size=ROWS)
        sink.flush()
        size = path.stat().st_size
        columns, sha256 = _columns(schema), _sha256_of(path, size)
        whole = replace(manifest, columns=columns, bytes=size, sha256=sha256)
        whole = replace(whole, root=digest(whole, without={"root"}))
        writer.add_key_value_metadata({KEY: to_signed_json(whole)})
    sink.flush()
    return whole


def _stored(path: Path) -> TableManifest | None:
    """The manifest in a Parquet file; None if it is not a table of align."""
    try:
        text = (pq.read_metadata(path).metadata or {}).get(KEY)
        return from_signed_json(TableManifest, text, TABLE_FORMAT) if text else None
    except (*_DAMAGE, CodecError) as error:
        raise damaged(path, str(error).partition("\n")[0], _REMEDY) from error


def _columns(schema: pa.Schema) -> dict[str, str]:
    # Parquet has a name of its own for what a list holds.
    return {one.name: str(one.type).replace("<item: ", "<element: ") for one in schema}


def _sha256_of(path: Path, size: int) -> str:
    """The digest of the first bytes of a file."""
    sha256 = hashlib.sha256()
    with fs.open_file(path) as source:
        while size > 0 and (chunk := source.read(min(size, 1 << 20))):
            sha256.update(chunk)
            size -= len(chunk)
    return sha256.hexdigest()


def _on_disk(path: Location) -> Path:
    """The file, or a copy of the object as it is now."""
    return path if isinstance(path, Path) else fetch_folder(str(path), list)
