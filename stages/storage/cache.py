"""A finished cache: its folder, its shards and its manifest; cache_work.py makes one.

manifest.json                         written last; it names all other files
data/part-<shard>-<sha256>.parquet    shards, named by their content
rejected.parquet                      rows that could not be used, if any
_align/LOCK                           locked by the owner of the folder
_align/outbox/<time>-<id>/            a run whose upload to a tracker is pending
_align/<plan key>/                    work in progress, removed at the end

A finished cache never changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...schemas.cache import FORMAT_VERSION, FileEntry, Manifest, Shard
from ...schemas.errors import CorruptionError, StorageError, UsageError
from ...schemas.file_version import Remember, digest_anew
from ...schemas.row_table import Rows
from .disk.digests import remembered_sha256
from .records import Records
from .shards import read_rows

MANIFESTS = Records(
    Manifest,
    remedy="Restore it from a copy, or make the cache again.",
    format_version=FORMAT_VERSION,
)


class Cache:
    """The folder of a cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest_file = root / "manifest.json"
        self.data = root / "data"
        self.rejected = root / "rejected.parquet"
        self.private = root / "_align"
        self.outbox = self.private / "outbox"

    def __str__(self) -> str:
        return str(self.root)

    def manifest(self) -> Manifest:
        """The manifest of a finished cache."""
        if not self.root.exists():
            raise UsageError(
                f"{self}: no such cache folder. Check the path, or make the cache with "
                "`align precompute-ref`."
            )
        if not self.manifest_file.exists():
            raise UsageError(
                f"{self} is not a finished cache: it has no manifest.json. "
                "Make it with `align precompute-ref`, or let that command finish."
            )
        return MANIFESTS.read(self.manifest_file)

    def shard(self, entry: Shard) -> Path:
        """The path of a shard."""
        return self.data / entry.file

    def check(self, entry: Shard | FileEntry, remember: Remember = digest_anew) -> None:
        """CorruptionError unless a file's size and digest are the recorded ones."""
        path = self.rejected if isinstance(entry, FileEntry) else self.shard(entry)
        try:
            size = path.stat().st_size
            is_same = size == entry.bytes and remembered_sha256(path, remember) == entry.sha256
        except (OSError, StorageError) as error:
            raise CorruptionError(
                f"{path} cannot be opened: {error.__cause__ or error}."
            ) from error
        if not is_same:
            raise CorruptionError(f"{path} was altered: its size or sha256 differs.")

    def sample_rows(self, manifest: Manifest, count: int) -> Iterator[tuple[str, Rows]]:
        """Rows from all over the cache, a few at a time, with the name of their shard."""
        wanted = np.unique(np.arange(count) * manifest.rows // count)
        first = 0
        for shard in manifest.shards:
            here = wanted[(wanted >= first) & (wanted < first + shard.rows)] - first
            first += shard.rows
            if len(here):
                for block in read_rows(self.shard(shard), here):
                    yield shard.file, block
