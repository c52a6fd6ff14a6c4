"""Encoded records as columns, each row with the hashes that place it on the ring."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.ragged import Ragged, offsets_of
from ...schemas.rows import RowBlock
from .prompt_keys import prompt_keys_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from .encode import EncodedRecord


@dataclass(frozen=True)
class KeyedRows:
    """Rows with their places: those of one prompt have one place, so they lie together."""

    rows: RowBlock
    places: NDArray[np.uint64]  # (rows,) on the ring: a seeded hash of the prompt's key
    completion_keys: NDArray[np.uint64]  # (branches,) hash of the completion's ids

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: NDArray[np.int64]) -> KeyedRows:
        """The rows at `indices`, in that order."""
        branches = self.rows.branches_of(indices)
        return KeyedRows(
            self.rows.take(indices), self.places[indices], self.completion_keys[branches]
        )

    def in_ring_order(self) -> KeyedRows:
        """Sorted by place, then by the row's own digest."""
        halves = self.rows.row_id.view(">u8").reshape(-1, 2)
        return self.take(np.lexsort((halves[:, 1], halves[:, 0], self.places)))

    @staticmethod
    def concat(parts: Sequence[KeyedRows]) -> KeyedRows:
        """Joins several, in order."""
        return KeyedRows(
            RowBlock.concat([part.rows for part in parts]),
            np.concatenate([part.places for part in parts]),
            np.concatenate([part.completion_keys for part in parts]),
        )


def key_rows(encoded: Sequence[EncodedRecord], *, seed: int, carried: Sequence[str]) -> KeyedRows:
    """Turns encoded records into columns and hashes each of them."""
    completions = [ids for row in encoded for ids in row.completions]
    records = [row.record for row in encoded]
    prompt_keys = prompt_keys_of(records)
    completion_digests = [_digest(array("i", ids).tobytes(), size=16) for ids in completions]
    offsets = offsets_of(np.array([len(row.completions) for row in encoded], dtype=np.int64))
    rows = RowBlock(
        row_id=_row_ids(encoded, prompt_keys.prompt.tobytes(), completion_digests, offsets),
        copy=np.zeros(len(encoded), dtype=np.int32),
        file=np.array([record.file for record in records], dtype=np.uint64),
        row=np.array([record.row for record in records], dtype=np.int64),
        prompt_keys=prompt_keys,
        prompts=Ragged.of([row.prompt for row in encoded], np.int32),
        prompt_cut=np.array([row.prompt_cut for row in encoded], dtype=np.int32),
        branch_offsets=offsets,
        completions=Ragged.of(completions, np.int32),
        roles=np.array([role for record in records for role in record.roles], dtype=np.int8),
        scores=np.array(
            [_number(s) for record in records for s in record.scores], dtype=np.float64
        ),
        cut=np.array([cut for row in encoded for cut in row.cut], dtype=np.int32),
        carried={
            name: np.array([record.carried[name] for record in records], dtype=np.float64)
            for name in carried
        },
    )
    return KeyedRows(
        rows,
        _places(prompt_keys.prompt.tobytes(), seed),
        np.frombuffer(b"".join(completion_digests), dtype=np.uint64)[::2].copy(),
    )


def completion_keys(completions: Iterable[NDArray[np.int32]]) -> NDArray[np.uint64]:
    """The keys of completions, as `key_rows` makes them."""
    digests = [_digest(ids.tobytes(), size=16)[:8] for ids in completions]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def row_digest(
    prompt: bytes,  # its key and its ids
    completion_digests: Sequence[bytes],
    *,
    roles: bytes,
    scores: bytes,
    carried: bytes,
) -> bytes:
    """Sixteen bytes that depend on everything in the row but where it came from."""
    head = b"%d,%d,%d,%d;" % (len(prompt), len(completion_digests), len(scores), len(carried))
    return _digest(b"".join((head, prompt, *completion_digests, roles, scores, carried)), size=16)


def _row_ids(
    encoded: Sequence[EncodedRecord],
    prompt_keys: bytes,
    completion_digests: Sequence[bytes],
    offsets: NDArray[np.int64],
) -> NDArray[np.bytes_]:
    digests = [
        row_digest(
            prompt_keys[16 * index : 16 * index + 16] + array("i", row.prompt).tobytes(),
            completion_digests[offsets[index] : offsets[index + 1]],
            roles=bytes(row.record.roles),
            scores=array("d", map(_number, row.record.scores)).tobytes(),
            carried=array("d", row.record.carried.values()).tobytes(),
        )
        for index, row in enumerate(encoded)
    ]
    return np.frombuffer(b"".join(digests), dtype="S16")


def _places(prompt_keys: bytes, seed: int) -> NDArray[np.uint64]:
    salt = str(seed).encode()
    starts = range(0, len(prompt_keys), 16)
    places = [_digest(prompt_keys[start : start + 16], size=8, key=salt) for start in starts]
    return np.frombuffer(b"".join(places), dtype=np.uint64)


def _number(score: float | None) -> float:
    return nan if score is None else score


def _digest(content: bytes, *, size: int, key: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=size, key=key).digest()
