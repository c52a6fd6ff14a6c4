"""Scores of earlier caches, looked up by the content of each branch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import Shard
from ...schemas.columns import Ragged
from ...schemas.errors import CorruptionError, StorageError, UsageError
from ...schemas.row_table import Rows
from ..storage.cache import Cache
from ..storage.shards import read_shard
from .score import KnownScores

SHARDS_HELD = 4

logger = logging.getLogger("align")


@dataclass(frozen=True)
class EarlierCache:
    """A cache of the same reference."""

    folder: Cache
    shards: tuple[Shard, ...]


class ReuseIndex:
    """The branches of earlier caches: of each only the shards whose keys may be the rows' are read.

    A shard that cannot be read is skipped.
    """

    def __init__(self, caches: Sequence[EarlierCache], *, need_token_logps: bool) -> None:
        self._shards = [(cache, commit) for cache in caches for commit in cache.shards]
        self._need_token_logps = need_token_logps
        self._load = lru_cache(SHARDS_HELD)(self._read)
        self._lost: set[int] = set()

    def find(self, rows: Rows, *, first_key: str, last_key: str) -> KnownScores:
        """The known scores of these rows, whose keys are between two."""
        count = len(rows.completions)
        found, logps, numerics = np.zeros(count, np.bool_), np.zeros(count), dict[str, str]()
        tokens, source = [Ragged.of([[]], np.float32)], np.zeros(count, np.int64)  # 0: not known
        keys: NDArray[np.bytes_] | None = None
        for number, (_, commit) in enumerate(self._shards):
            if commit.first_key > last_key or commit.last_key < first_key:
                continue
            known = self._load(number)
            if known is None or (self._need_token_logps and known.block.token_logps is None):
                continue
            keys = packed_keys(rows) if keys is None else keys
            wanted = np.flatnonzero(~found)
            at, is_known = look_up(known.keys, keys[wanted])
            branches, stored = wanted[is_known], known.order[at[is_known]]
            found[branches], logps[branches] = True, known.block.logps[stored]
            if self._need_token_logps and known.block.token_logps is not None:
                source[branches] = sum(map(len, tokens)) + np.arange(len(branches))
                tokens.append(known.block.token_logps.take(stored))
            if len(branches):
                numerics = numerics or commit.numerics
        kept = Ragged.concat(tokens).take(source) if self._need_token_logps else None
        return KnownScores(found=found, token_logps=kept, logps=logps, numerics=numerics)

    def _read(self, number: int) -> _Shard | None:
        """One shard; None, and a warning the first time, when it is damaged or missing."""
        cache, commit = self._shards[number]
        path = cache.folder.shard(commit)
        if number in self._lost:
            return None
        try:
            cache.folder.check(commit)
            block = read_shard(path)
        except (CorruptionError, StorageError, UsageError) as error:
            logger.warning("%s is not reused, its rows are scored again: %s", path, error)
            self._lost.add(number)
            return None
        keys = packed_keys(block)
        order = np.argsort(keys, kind="stable")
        return _Shard(keys[order], order, block)


@dataclass(frozen=True)
class _Shard:
    """A shard, and its branches in the order of their keys."""

    keys: NDArray[np.bytes_]  # (branches,) S16
    order: NDArray[np.int64]  # (branches,) among the branches of the block
    block: Rows


def look_up(
    known: NDArray[np.bytes_], keys: NDArray[np.bytes_]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The index of each key in the sorted `known`, and whether it is there."""
    at = np.searchsorted(known, keys)
    is_known = at < len(known)
    is_known[is_known] = known[at[is_known]] == keys[is_known]
    return at, is_known


def packed_keys(rows: Rows) -> NDArray[np.bytes_]:
    """The keys of all branches as one array of S16."""
    return np.frombuffer(b"".join(branch_keys(rows)), dtype="S16")


def branch_keys(rows: Rows) -> list[bytes]:
    """A digest of prompt ids, completion ids, the boundary and what is learned, per branch."""
    prompts = [
        hashlib.blake2b(prompt.tobytes(), digest_size=16, person=b"prompt")
        for prompt in rows.prompts
    ]
    keys = []
    told = rows.completion_bytes()
    for row, completion in zip(rows.row_of_branch.tolist(), told, strict=True):
        joined = hashlib.blake2b(prompts[row].digest(), digest_size=16, person=b"branch")
        joined.update(completion)
        keys.append(joined.digest())
    return keys
