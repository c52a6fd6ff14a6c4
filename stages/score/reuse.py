"""Looks up scores in earlier caches by the content of each completion."""

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

SHARDS_CACHED = 4

logger = logging.getLogger("align")


@dataclass(frozen=True)
class EarlierCache:
    """A cache of the same reference."""

    folder: Cache
    shards: tuple[Shard, ...]


class ReuseIndex:
    """The completions of earlier caches; only shards whose key range overlaps the rows' are read.

    A shard that cannot be read is skipped.
    """

    def __init__(self, caches: Sequence[EarlierCache], *, need_token_logps: bool) -> None:
        self._shards = [(cache, shard) for cache in caches for shard in cache.shards]
        self._need_token_logps = need_token_logps
        self._load = lru_cache(SHARDS_CACHED)(self._read)
        self._lost: set[int] = set()

    def find(self, rows: Rows, *, first_key: str, last_key: str) -> KnownScores:
        """The known scores of these rows, whose keys lie between two keys."""
        count = len(rows.completions)
        found, logps, numerics = np.zeros(count, np.bool_), np.zeros(count), dict[str, str]()
        tokens, source = [Ragged.of([[]], np.float32)], np.zeros(count, np.int64)  # 0: not known
        keys: NDArray[np.bytes_] | None = None
        for number, (_, shard) in enumerate(self._shards):
            if shard.first_key > last_key or shard.last_key < first_key:
                continue
            known = self._load(number)
            if known is None or (self._need_token_logps and known.block.token_logps is None):
                continue
            keys = packed_keys(rows) if keys is None else keys
            wanted = np.flatnonzero(~found)
            at, is_known = look_up(known.keys, keys[wanted])
            completions, stored = wanted[is_known], known.order[at[is_known]]
            found[completions], logps[completions] = True, known.block.logps[stored]
            if self._need_token_logps and known.block.token_logps is not None:
                source[completions] = sum(map(len, tokens)) + np.arange(len(completions))
                tokens.append(known.block.token_logps.take(stored))
            if len(completions):
                numerics = numerics or shard.numerics
        kept = Ragged.concat(tokens).take(source) if self._need_token_logps else None
        return KnownScores(found=found, token_logps=kept, logps=logps, numerics=numerics)

    def _read(self, number: int) -> _Shard | None:
        """One shard; None, with a warning the first time, if it is damaged or missing."""
        cache, shard = self._shards[number]
        path = cache.folder.shard(shard)
        if number in self._lost:
            return None
        try:
            cache.folder.check(shard)
            block = read_shard(path)
        except (CorruptionError, StorageError, UsageError) as error:
            logger.warning("%s is not reused and its rows are scored again: %s", path, error)
            self._lost.add(number)
            return None
        keys = packed_keys(block)
        order = np.argsort(keys, kind="stable")
        return _Shard(keys[order], order, block)


@dataclass(frozen=True)
class _Shard:
    """A shard, and its completions in the order of their keys."""

    keys: NDArray[np.bytes_]  # (completions,) S16
    order: NDArray[np.int64]  # (completions,) among the completions of the block
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
    """The keys of all completions as one array of S16."""
    return np.frombuffer(b"".join(completion_keys(rows)), dtype="S16")


def completion_keys(rows: Rows) -> list[bytes]:
    """The key of each completion."""
    prompts = [prompt.tobytes() for prompt in rows.prompts]
    each = zip(rows.row_of_completion.tolist(), rows.completion_bytes(), strict=True)
    return [completion_key(prompts[row], completion) for row, completion in each]


def completion_key(prompt: bytes, completion: bytes) -> bytes:
    """A digest of prompt ids, completion ids, their boundary and learned tokens."""
    head = hashlib.blake2b(prompt, digest_size=16, person=b"prompt").digest()
    return hashlib.blake2b(head + completion, digest_size=16, person=b"branch").digest()
