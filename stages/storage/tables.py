"""Tables of samples, judged samples and selected rows: one Parquet file with its settings.

samples.parquet   or judged.parquet, selected.parquet: stage 1 reads the folder, or the file
_align/           stored answers, see answers.py

A table's manifest is in the file's own metadata, under the key `align`: the digests of its inputs,
its settings and counts, and the sha256 of all bytes before the footer. So one rename publishes
both. Row groups are written and read one at a time.
"""

from __future__ import annotations

import filecmp
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import CorruptionError, UsageError, damaged
from ...schemas.json_codec import CodecError, digest, from_signed_json, to_signed_json
from ...schemas.samples import Distribution
from .copies import fetch_folder, work_folder
from .disk import fs
from .locations import is_remote
from .output_folder import OutputFolder

if TYPE_CHECKING:
    import polars as pl

TableKind: TypeAlias = Literal["samples", "judged", "selected"]

TABLE_FORMAT = 1
COMMANDS: dict[TableKind, str] = {
    "samples": "align sample",
    "judged": "align judge",
    "selected": "align select",
}
KEY = b"align"  # of the manifest in the file's metadata
ROWS = 1 << 16  # of a row group
_REMEDY = "Run the command that made it again."
_DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)


@dataclass(frozen=True)
class TableManifest:
    """The inputs, settings and content of a table."""

    format_version: int
    kind: TableKind
    made_from: dict[str, str]  # a digest for each name, such as prompts, model, samples
    settings: dict[str, Any]
    counts: dict[str, int]  # by name
    rows: int
    columns: dict[str, str]  # the type of each, by name
    bytes: int  # of the file, up to its footer
    sha256: str  # of these bytes
    sampling: Distribution | None  # how its samples were drawn, if known

    @property
    def root(self) -> str:
        """The table's id: a digest of the manifest."""
        return digest(self)


@dataclass(frozen=True)
class TableFolder:
    """The folder of one table; with a URL, it is made here and uploaded to a bucket."""

    root: Path
    kind: TableKind
    url: str = ""

    @staticmethod
    def at(text: str, kind: TableKind) -> TableFolder:
        """The folder that a setting names."""
        if is_remote(text):
            return TableFolder(work_folder(text), kind, text)
        return TableFolder(Path(text), kind)

    def __str__(self) -> str:
        return self.url or str(self.root)

    @property
    def file(self) -> Path:
        """The table's file; for a bucket, the local file that is uploaded."""
        return self.root / f"{self.kind}.parquet"

    def answers(self, named: str) -> Path:
        """The folder of answers on a disk: the named one, or the table's own."""
        return Path(named) if named else self.root / "_align" / "answers"

    def stored(self) -> Path | None:
        """The table's file, or a local copy of it; None if there is none."""
        if not self.url:
            return self.file if self.file.is_file() else None
        try:
            return fetch_folder(f"{self.url}/{self.file.name}", lambda _: [])
        except UsageError:  # there is no such object
            return None

    def prepare(self) -> None:
        """Makes the folder; refuses one with other content."""
        OutputFolder(self.root, self.kind).prepare()
        fs.drop_drafts(self.file)
        if self.url:  # the mark of its command is on the machine that made it
            from .remote import Remote  # noqa: PLC0415 - its library takes a while to import

            for kind in COMMANDS:
                if kind != self.kind and Remote(self.url).version(f"{kind}.parquet"):
                    raise UsageError(
                        f"{self} holds {kind}.parquet and is not a {self.kind} folder. Choose "
                        "another --output."
                    )

    def find(self) -> TableManifest | None:
        """The manifest of the table, if there is one; refuses one of another kind."""
        path = self.stored()
        found = _manifest_in(path) if path else None
        if found and found.kind != self.kind:
            raise UsageError(
                f"{self} holds {found.kind} as {self.file.name}. Name a folder that "
                f"`{COMMANDS[self.kind]}` made."
            )
        return found

    def publish(
        self,
        table: pl.DataFrame,
        *,
        made_from: Mapping[str, str],
        settings: Mapping[str, Any],
        counts: Mapping[str, int],
        sampling: Distribution | None = None,
    ) -> TableManifest:
        """Writes the table with its manifest, unless the same one exists; replaces another.

        The same rows and settings give the same bytes.
        """
        schema = table.clear().to_arrow().schema
        how = {"compression": "zstd", "write_statistics": False}
        with fs.locked_draft(self.file) as (draft, sink):
            with pq.ParquetWriter(sink, schema, **how) as writer:
                for start in range(0, table.height, ROWS):
                    writer.write_table(table.slice(start, ROWS).to_arrow(), row_group_size=ROWS)
                sink.flush()
                size = draft.stat().st_size
                manifest = TableManifest(
                    format_version=TABLE_FORMAT,
                    kind=self.kind,
                    made_from=dict(made_from),
                    settings=dict(settings),
                    counts=dict(counts),
                    rows=table.height,
                    columns=_columns(schema),
                    bytes=size,
                    sha256=_sha256_of(draft, size),
                    sampling=sampling,
                )
                writer.add_key_value_metadata({KEY: to_signed_json(manifest)})
            sink.flush()
            there = self.stored()
            if not (there and filecmp.cmp(draft, there, shallow=False)):
                fs.fsync(draft)
                fs.rename(draft, self.file)
            # Also if it exists: its writer may have died before its name was durable.
            fs.fsync(self.root)
        if self.url and self.file.is_file():
            from .remote import Remote  # noqa: PLC0415 - its library takes a while to import

            Remote(self.url).put(self.file.name, self.file)
            fs.unlink(self.file)
        return manifest


def distribution_of(path: Path) -> Distribution | None:
    """The distribution of the samples in a data file, if it is a table of align."""
    try:
        manifest = _manifest_in(path) if path.suffix == ".parquet" else None
    except CorruptionError:  # other data than a table of align
        return None
    return manifest.sampling if manifest else None


def read_table(folder: TableFolder) -> tuple[TableManifest, pl.DataFrame]:
    """A finished table, verified against its manifest."""
    import polars as pl  # noqa: PLC0415 - commands that read no table need not import it

    manifest, path = folder.find(), folder.stored()
    if not (manifest and path):
        raise UsageError(
            f"{folder} holds no finished {folder.file.name}. Run `{COMMANDS[folder.kind]}` until "
            "it ends, or name another folder."
        )
    if _sha256_of(path, manifest.bytes) != manifest.sha256:
        raise damaged(path, "its rows were altered", _REMEDY)
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            schema = file.schema_arrow
            if (_columns(schema), file.metadata.num_rows) != (manifest.columns, manifest.rows):
                raise damaged(path, "its footer was altered", _REMEDY)
            groups = map(file.read_row_group, range(file.num_row_groups))
            pieces = [pl.from_arrow(one) for one in (schema.empty_table(), *groups)]
    except _DAMAGE as error:
        raise damaged(path, str(error).partition("\n")[0], _REMEDY) from error
    return manifest, pl.concat(cast("list[pl.DataFrame]", pieces))


def _manifest_in(path: Path) -> TableManifest | None:
    """The manifest in a Parquet file; None if it is not a table of align."""
    try:
        text = (pq.read_metadata(path).metadata or {}).get(KEY)
        return from_signed_json(TableManifest, text, TABLE_FORMAT) if text else None
    except (*_DAMAGE, CodecError) as error:
        raise damaged(path, str(error).partition("\n")[0], _REMEDY) from error


def _columns(schema: pa.Schema) -> dict[str, str]:
    """The type of each column, equal for a table in memory and the same one read from Parquet.

    A list of texts is `list<item: string>` in memory, and `list<element: string>` in Parquet.
    """
    return {one.name: str(one.type).replace("<item: ", "<element: ") for one in schema}


def _sha256_of(path: Path, size: int) -> str:
    """The digest of the first bytes of a file."""
    sha256 = hashlib.sha256()
    with fs.open_file(path) as source:
        while size > 0 and (chunk := source.read(min(size, 1 << 20))):
            sha256.update(chunk)
            size -= len(chunk)
    return sha256.hexdigest()
