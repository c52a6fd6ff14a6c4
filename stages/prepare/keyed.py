"""Encoded records as columns, each row with the hashes that place it on the ring."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.ragged import Ragged, offsets_of
from ...schemas.rows import RowBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .encode import EncodedRecord


@dataclass(frozen=True)
class KeyedRows:
    """Rows with their keys: equal prompts have equal keys, so they lie together once sorted."""

    rows: RowBlock
    prompt_keys: NDArray[np.uint64]  # (rows,) seeded hash of the prompt's ids
    completion_keys: NDArray[np.uint64]  # (branches,) hash of the completion's ids

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: NDArray[np.int64]) -> KeyedRows:
        """The rows at `indices`, in that order."""
        branches = self.rows.branches_of(indices)
        return KeyedRows(
            self.rows.take(indices), self.prompt_keys[indices], self.completion_keys[branches]
        )

    def in_ring_order(self) -> KeyedRows:
        """Sorted by prompt key, then by the row's own digest."""
        halves = self.rows.row_id.view(">u8").reshape(-1, 2)
        return self.take(np.lexsort((halves[:, 1], halves[:, 0], self.prompt_keys)))

    @staticmethod
    def concat(parts: Sequence[KeyedRows]) -> KeyedRows:
        """Joins several, in order."""
        return KeyedRows(
            RowBlock.concat([part.rows for part in parts]),
            np.concatenate([part.prompt_keys for part in parts]),
            np.concatenate([part.completion_keys for part in parts]),
        )


def key_rows(encoded: Sequence[EncodedRecord], *, seed: int, carried: Sequence[str]) -> KeyedRows:
    """Turns encoded records into columns and hashes each of them."""
    completions = [ids for row in encoded for ids in row.completions]
    records = [row.record for row in encoded]
    scores = [np.nan if s is None else s for record in records for s in record.scores]
    prompt_bytes = [array("i", row.prompt).tobytes() for row in encoded]
    completion_digests = [_digest(array("i", ids).tobytes(), size=16) for ids in completions]
    offsets = offsets_of(np.array([len(row.completions) for row in encoded], dtype=np.int64))
    rows = RowBlock(
        row_id=_row_ids(encoded, prompt_bytes, completion_digests, offsets),
        copy=np.zeros(len(encoded), dtype=np.int32),
        file=np.array([record.file for record in records], dtype=np.int32),
        row=np.array([record.row for record in records], dtype=np.int64),
        prompts=Ragged.of([row.prompt for row in encoded], np.int32),
        prompt_cut=np.array([row.prompt_cut for row in encoded], dtype=np.int32),
        branch_offsets=offsets,
        completions=Ragged.of(completions, np.int32),
        roles=np.array([role for record in records for role in record.roles], dtype=np.int8),
        scores=np.array(scores, dtype=np.float32),
        cut=np.array([cut for row in encoded for cut in row.cut], dtype=np.int32),
        carried={
            name: np.array([record.carried[name] for record in records], dtype=np.float64)
            for name in carried
        },
    )
    salt = str(seed).encode()
    prompt_digests = [_digest(prompt, size=8, key=salt) for prompt in prompt_bytes]
    return KeyedRows(
        rows,
        np.frombuffer(b"".join(prompt_digests), dtype=np.uint64),
        np.frombuffer(b"".join(completion_digests), dtype=np.uint64)[::2].copy(),
    )


def row_digest(
    prompt: bytes,
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
    prompt_bytes: Sequence[bytes],
    completion_digests: Sequence[bytes],
    offsets: NDArray[np.int64],
) -> NDArray[np.bytes_]:
    digests = [
        row_digest(
            prompt,
            completion_digests[offsets[index] : offsets[index + 1]],
            roles=bytes(row.record.roles),
            scores=array("d", [s for s in row.record.scores if s is not None]).tobytes(),
            carried=array("d", row.record.carried.values()).tobytes(),
        )
        for index, (row, prompt) in enumerate(zip(encoded, prompt_bytes, strict=True))
    ]
    return np.frombuffer(b"".join(digests), dtype="S16")


def _digest(content: bytes, *, size: int, key: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=size, key=key).digest()
