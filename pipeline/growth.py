"""A cache may grow in place, but nothing that was paid for may be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..schemas.errors import FingerprintError
from ..stages.storage.shards import iter_row_groups

if TYPE_CHECKING:
    from ..schemas.manifest import Manifest
    from ..stages.prepare.spool import Spool
    from ..stages.storage.layout import CacheFolder


def require_growth(folder: CacheFolder, manifest: Manifest, spool: Spool) -> None:
    """Refuses when the cache holds rows that the new data no longer have."""
    ids = spool.column("row_id").view(np.uint8).reshape(-1, 16)
    copies = spool.column("copy")
    present = {row_name(raw.tobytes(), copy) for raw, copy in zip(ids, copies, strict=True)}
    lost = sum(name not in present for name in _stored_names(folder, manifest))
    if lost:
        raise FingerprintError(
            f"{folder.root} belongs to another cache: {lost} of its {manifest.rows} rows are not "
            "in the data any more (data.files differs). Choose another --output; scores both "
            "caches need are copied, not computed again."
        )


def row_name(raw: bytes, copy: int) -> str:
    """The text a shard stores as `row_id`."""
    return f"{raw.hex()}-{copy}" if copy else raw.hex()


def _stored_names(folder: CacheFolder, manifest: Manifest) -> list[str]:
    return [
        name
        for commit in manifest.shards
        for table in iter_row_groups(folder.data / commit.file, ["row_id"])
        for name in table["row_id"].to_pylist()
    ]
