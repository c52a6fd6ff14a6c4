"""Scores of earlier caches, looked up by the content of each branch."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...schemas.cache import Commit
from ...schemas.columns import Ragged
from ...schemas.errors import CorruptionError, StorageError, UsageError
from ...schemas.rows import RowBlock, ScoredBlock
from ..storage.cache.cache_folder import CacheFolder
from ..storage.cache.shards import read_shard
from ..storage.cache.verify_cache import check_shard
from .score import KnownScores

SHARDS_KEPT_OPEN = 4

logger = logging.getLogger("align")


@dataclass(frozen=True)
class EarlierCache:
    """A cache of the same reference; `same_ring`: whether key ranges can be compared."""

    folder: CacheFolder
    shards: tuple[Commit, ...]
    same_ring: bool


class ReuseIndex:
    """An index of the branches of earlier caches; a shard that cannot be read is skipped.

    Of caches on the same ring only the shards whose key range overlaps the rows' are read. Caches
    on other rings are read once into an index of 32 bytes a branch; token log-probs stay on disk.
    """

    def __init__(self, caches: Sequence[EarlierCache], *, need_token_logps: bool) -> None:
        self._shards = [(cache, commit) for cache in caches for commit in cache.shards]
        self._need_token_logps = need_token_logps
        self._open: OrderedDict[int, _Branches] = OrderedDict()
        self._lost: set[int] = set()

    def find(self, rows: RowBlock, *, first_key: str, last_key: str) -> KnownScores:
        """The known scores of these rows, whose ring keys are between two."""
        found = _Found.nothing(len(rows.completions))
        keys = packed_keys(rows) if self._shards else np.empty(0, dtype="S16")
        for known in self._known(first_key, last_key):
            wanted = np.flatnonzero(~found.found)
            at, is_known = look_up(known.keys, keys[wanted])
            self._copy(found, wanted[is_known], known, at[is_known])
        kept = Ragged.of(found.tokens, np.float32) if self._need_token_logps else None
        return KnownScores(
            found=found.found, token_logps=kept, logps=found.logps, numerics=found.numerics
        )

    def _known(self, first_key: str, last_key: str) -> Iterator[_Branches]:
        for number, (cache, commit) in enumerate(self._shards):
            meets = commit.first_key <= last_key and commit.last_key >= first_key
            if cache.same_ring and meets:
                yield self._load(number)
        if self._shards:
            yield self._elsewhere

    def _copy(
        self, found: _Found, branches: NDArray[np.int64], known: _Branches, at: NDArray[np.int64]
    ) -> None:
        """Copies the scores at the indices `at` of `known`, shard by shard."""
        for shard in np.unique(known.shards[at]).tolist():
            here = known.shards[at] == shard
            if self._need_token_logps:
                stored = known.token_logps or self._token_logps(shard)
                if stored is None:
                    continue
                indices = known.indices[at[here]].tolist()
                for branch, index in zip(branches[here].tolist(), indices, strict=True):
                    found.tokens[branch] = stored[index].copy()
            found.found[branches[here]] = True
            found.logps[branches[here]] = known.logps[at[here]]
            found.numerics = found.numerics or self._shards[shard][1].numerics

    def _load(self, number: int) -> _Branches:
        if number not in self._open:
            while len(self._open) >= SHARDS_KEPT_OPEN:
                self._open.popitem(last=False)
            self._open[number] = self._branches(number)
        self._open.move_to_end(number)
        return self._open[number]

    @cached_property
    def _elsewhere(self) -> _Branches:
        """The branches on other rings, where every unit may need every shard."""
        shards = [number for number, (cache, _) in enumerate(self._shards) if not cache.same_ring]
        return _Branches.joined([self._branches(number).without_tokens() for number in shards])

    def _branches(self, number: int) -> _Branches:
        block = self._read(number)
        if block is None or (self._need_token_logps and block.token_logps is None):
            return _Branches.joined([])
        return _Branches.of(block, number, with_tokens=self._need_token_logps)

    def _token_logps(self, number: int) -> Ragged | None:
        block = self._read(number)
        return block.token_logps if block else None

    def _read(self, number: int) -> ScoredBlock | None:
        """One shard; None, and a warning the first time, when it is damaged or missing."""
        cache, commit = self._shards[number]
        path = cache.folder.shard(commit)
        if number in self._lost:
            return None
        try:
            check_shard(cache.folder, commit)
            return read_shard(path)
        except (CorruptionError, StorageError, UsageError) as error:
            logger.warning("%s is not reused, its rows are scored again: %s", path, error)
            self._lost.add(number)
            return None


@dataclass
class _Found:
    """The scores found so far, per branch."""

    found: NDArray[np.bool_]
    logps: NDArray[np.float64]
    tokens: list[NDArray[np.float32]]
    numerics: dict[str, str]

    @staticmethod
    def nothing(count: int) -> _Found:
        none = np.empty(0, dtype=np.float32)
        return _Found(np.zeros(count, dtype=np.bool_), np.zeros(count), [none] * count, {})


@dataclass(frozen=True)
class _Branches:
    """Scored branches in the order of their keys, and the location of each."""

    keys: NDArray[np.bytes_]  # (branches,) S16
    logps: NDArray[np.float64]  # (branches,)
    shards: NDArray[np.int32]  # (branches,)
    indices: NDArray[np.int32]  # (branches,) among the branches of the shard
    token_logps: Ragged | None = None  # of the one shard, in its own order

    @staticmethod
    def of(block: ScoredBlock, shard: int, *, with_tokens: bool) -> _Branches:
        keys = packed_keys(block.rows)
        order = np.argsort(keys, kind="stable")
        shards = np.full(len(keys), shard, dtype=np.int32)
        tokens = block.token_logps if with_tokens else None
        return _Branches(keys[order], block.logps[order], shards, order.astype(np.int32), tokens)

    @staticmethod
    def joined(parts: Sequence[_Branches]) -> _Branches:
        """The branches of all parts; equal keys are in the order of the parts."""
        nothing = np.empty(0, dtype=np.int32)
        keys = np.concatenate([np.empty(0, dtype="S16"), *(part.keys for part in parts)])
        order = np.argsort(keys, kind="stable")
        return _Branches(
            keys[order],
            np.concatenate([np.empty(0), *(part.logps for part in parts)])[order],
            np.concatenate([nothing, *(part.shards for part in parts)])[order],
            np.concatenate([nothing, *(part.indices for part in parts)])[order],
        )

    def without_tokens(self) -> _Branches:
        return _Branches(self.keys, self.logps, self.shards, self.indices)


def look_up(
    known: NDArray[np.bytes_], keys: NDArray[np.bytes_]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The index of each key in the sorted `known`, and whether it is there."""
    at = np.searchsorted(known, keys)
    is_known = at < len(known)
    is_known[is_known] = known[at[is_known]] == keys[is_known]
    return at, is_known


def packed_keys(rows: RowBlock) -> NDArray[np.bytes_]:
    """The keys of all branches as one array of S16."""
    return np.frombuffer(b"".join(branch_keys(rows)), dtype="S16")


def branch_keys(rows: RowBlock) -> list[bytes]:
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
