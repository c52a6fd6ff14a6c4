"""Tables of samples, judged samples and selected rows: one Parquet file and its manifest.

samples.parquet   or judged.parquet, selected.parquet: stage 1 reads the folder, or the file
_manifest.json    written last; digests of the table and of what it was made from
_align/           answers that were paid for, see answers.py
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...schemas.errors import CorruptionError, UsageError
from ...schemas.json_codec import signed, to_json
from ...schemas.samples import Drawing
from ...schemas.table_manifest import TABLE_FORMAT, TableKind, TableManifest
from .bucket.objects import Location, location
from .cache.cache_folder import OutputFolder
from .copies import origin_of
from .signed_records import SignedRecords
from .store import Store, store_of

if TYPE_CHECKING:
    import polars as pl

MANIFEST = "_manifest.json"
NAMES: dict[TableKind, str] = {
    "samples": "samples",
    "judged": "judged samples",
    "selected": "selected rows",
}
COMMANDS = {"samples": "align sample", "judged": "align judge", "selected": "align select"}


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

    @property
    def manifest(self) -> Location:
        """Written last."""
        return self.root / MANIFEST

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
            self.store.drop_drafts(self.root, (self.file.name, MANIFEST))
        else:
            with suppress(CorruptionError):  # a damaged manifest is written again
                self.find()

    def find(self) -> TableManifest | None:
        """The manifest, if there is one; it has to be of a table of this kind."""
        found = _MANIFESTS.find(self.manifest)
        if found and found.kind != self.kind:
            raise UsageError(
                f"{self.root} holds {NAMES[found.kind]}, not {NAMES[self.kind]}. Name a folder "
                f"that `{COMMANDS[self.kind]}` made."
            )
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
        """Writes the table, then its manifest; without effect if both are there."""
        payload = io.BytesIO()
        # Row groups follow chunks, and these follow the number of threads that made the table.
        table.rechunk().write_parquet(payload, compression="zstd", statistics=False)
        content = payload.getvalue()
        unsigned = TableManifest(
            TABLE_FORMAT,
            __version__,
            "",
            self.kind,
            dict(made_from),
            dict(settings),
            dict(counts),
            table.height,
            f"{self.kind}.parquet",
            len(content),
            hashlib.sha256(content).hexdigest(),
            sampling,
        )
        manifest = signed(unsigned)
        for path, text in ((self.file, content), (self.manifest, to_json(manifest).encode())):
            known = self.store.read(path) if path.is_file() else None
            if is_new := known != text:
                self.store.replace(path, text, known=known, label="table")
        if not is_new:  # whoever wrote the manifest may have died before its name was durable
            self.store.sync_names(self.root)
        return manifest


def read_manifest(folder: TableFolder) -> TableManifest:
    """The manifest of a finished table."""
    if found := folder.find():
        return found
    raise UsageError(
        f"{folder.root} holds no {MANIFEST}, so it is not a finished table of "
        f"{NAMES[folder.kind]}. Run `{COMMANDS[folder.kind]}` to its end, or name another folder."
    )


_MANIFESTS = SignedRecords(
    TableManifest, label="table", remedy="Run the command that made it again."
)


def drawing_of(path: Path, sha256: str) -> Drawing | None:
    """How the samples in a data file were drawn, if it is a table as its manifest names it."""
    kind = next((kind for kind in NAMES if path.name == f"{kind}.parquet"), None)
    if kind is None:
        return None
    home = location(origin_of(str(path))).parent
    try:
        folder = TableFolder(home, kind)
        manifest = folder.find() if folder.manifest.is_file() else None
    except (CorruptionError, UsageError):  # it is data all the same
        return None
    return manifest.drawing if manifest and manifest.sha256 == sha256 else None


def read_table(folder: TableFolder) -> tuple[TableManifest, pl.DataFrame]:
    """A finished table, its bytes compared with the manifest."""
    import polars as pl  # noqa: PLC0415 - a command that reads no table need not wait for it

    manifest = read_manifest(folder)
    content = folder.store.read(folder.file)
    if hashlib.sha256(content).hexdigest() != manifest.sha256:
        raise CorruptionError(
            f"{folder.file} is not what {MANIFEST} names: it is damaged, or was being replaced "
            "when its writer was stopped. Run the command that made it again."
        )
    return manifest, pl.read_parquet(io.BytesIO(content))
