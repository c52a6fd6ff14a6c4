"""Scores that an earlier cache already holds, found by the content of each branch."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.ragged import Ragged
from ..storage.shards import read_shard
from ..storage.verify import check_shard
from .score import KnownScores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...schemas.manifest import Commit
    from ...schemas.rows import RowBlock
    from ..storage.layout import CacheFolder

SHARDS_KEPT_OPEN = 4


@dataclass(frozen=True)
class EarlierCache:
    """A cache made with the same reference; `same_ring` says that arcs can be compared."""

    folder: CacheFolder
    shards: tuple[Commit, ...]
    same_ring: bool


@dataclass(frozen=True)
class _Scores:
    numerics: dict[str, str]
    logps: dict[bytes, float]
    token_logps: dict[bytes, NDArray[np.float32]]


class ReuseIndex:
    """Looks branches up in earlier caches, reading only the shards whose arc can hold them."""

    def __init__(self, caches: Sequence[EarlierCache], *, need_token_logps: bool) -> None:
        self._caches = caches
        self._need_token_logps = need_token_logps
        self._open: OrderedDict[str, _Scores] = OrderedDict()

    def find(self, rows: RowBlock, *, first_key: str, last_key: str) -> KnownScores:
        """What is known of these rows, which lie between two places on the ring."""
        count = len(rows.completions)
        found = np.zeros(count, dtype=np.bool_)
        logps = np.zeros(count, dtype=np.float64)
        tokens: list[NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * count
        shards = [
            self._load(cache, commit)
            for cache in self._caches
            for commit in cache.shards
            if not cache.same_ring
            or (commit.first_key <= last_key and commit.last_key >= first_key)
        ]
        numerics: dict[str, str] = {}
        keys = branch_keys(rows) if shards else []
        for branch, key in enumerate(keys):
            for scores in shards:
                if key in scores.logps:
                    found[branch], logps[branch] = True, scores.logps[key]
                    numerics = numerics or scores.numerics
                    if self._need_token_logps:
                        tokens[branch] = scores.token_logps[key]
                    break
        kept = Ragged.of(tokens, np.float32) if self._need_token_logps else None
        return KnownScores(found=found, token_logps=kept, logps=logps, numerics=numerics)

    def _load(self, cache: EarlierCache, commit: Commit) -> _Scores:
        name = f"{cache.folder.root}/{commit.file}"
        if name not in self._open:
            check_shard(cache.folder, commit)
            self._open[name] = _scores(cache, commit, with_tokens=self._need_token_logps)
            # Without arcs every shard is looked at by every unit: keep them all.
            while cache.same_ring and len(self._open) > SHARDS_KEPT_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]


def branch_keys(rows: RowBlock) -> list[bytes]:
    """A digest of prompt ids, completion ids and the boundary, per branch."""
    prompts = [
        hashlib.blake2b(prompt.tobytes(), digest_size=16, person=b"prompt")
        for prompt in rows.prompts
    ]
    keys = []
    for row, completion in zip(rows.row_of_branch.tolist(), rows.completions, strict=True):
        joined = hashlib.blake2b(prompts[row].digest(), digest_size=16, person=b"branch")
        joined.update(completion.tobytes())
        keys.append(joined.digest())
    return keys


def _scores(cache: EarlierCache, commit: Commit, *, with_tokens: bool) -> _Scores:
    block = read_shard(cache.folder.data / commit.file)
    keys = branch_keys(block.rows)
    if not with_tokens:
        return _Scores(commit.numerics, dict(zip(keys, block.logps.tolist(), strict=True)), {})
    if block.token_logps is None:
        return _Scores(commit.numerics, {}, {})
    return _Scores(
        commit.numerics,
        dict(zip(keys, block.logps.tolist(), strict=True)),
        dict(zip(keys, block.token_logps, strict=True)),
    )
