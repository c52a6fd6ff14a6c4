"""A few rows of a cache, spread evenly over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .shards import read_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...schemas.cache import Manifest
    from ...schemas.rows import ScoredBlock
    from .layout import CacheFolder


def sample_rows(
    folder: CacheFolder, manifest: Manifest, count: int
) -> Iterator[tuple[str, ScoredBlock]]:
    """The name of a shard and the rows taken from it, shard by shard."""
    wanted = np.unique(np.arange(count) * manifest.rows // count)
    first = 0
    for commit in manifest.shards:
        here = wanted[(wanted >= first) & (wanted < first + commit.rows)] - first
        first += commit.rows
        if len(here):
            yield commit.file, read_shard(folder.data / commit.file).take(here)
