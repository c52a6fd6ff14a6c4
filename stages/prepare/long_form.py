"""Long-form scores: one row per completion becomes one row per prompt."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .keyed import KeyedRows

if TYPE_CHECKING:
    from collections import Counter

    from numpy.typing import NDArray

    from ...schemas.ragged import Ragged


def merge_same_prompts(keyed: KeyedRows, notes: Counter[str]) -> KeyedRows:
    """Joins neighbouring rows with one prompt; their branches keep ring order."""
    rows = keyed.rows
    firsts = _first_of_each_prompt(keyed)
    stops = np.append(firsts[1:], len(rows))
    notes["rows_joined_by_prompt"] += len(rows) - len(firsts)
    for name, column in rows.carried.items():
        lowest = np.minimum.reduceat(column, firsts)
        highest = np.maximum.reduceat(column, firsts)
        notes[f"prompts_with_more_than_one_{name}"] += int((lowest != highest).sum())
    heads = rows.take(firsts)
    merged = replace(
        rows,
        row_id=_joined_ids(rows.row_id, firsts, stops),
        copy=heads.copy,
        file=heads.file,
        row=heads.row,
        prompts=heads.prompts,
        prompt_cut=heads.prompt_cut,
        branch_offsets=np.append(rows.branch_offsets[firsts], rows.branch_offsets[-1]),
        carried=heads.carried,
    )
    return KeyedRows(merged, keyed.prompt_keys[firsts], keyed.completion_keys).in_ring_order()


def _first_of_each_prompt(keyed: KeyedRows) -> NDArray[np.int64]:
    prompts: Ragged = keyed.rows.prompts
    starts_new = np.append(True, keyed.prompt_keys[1:] != keyed.prompt_keys[:-1])
    for index in np.flatnonzero(~starts_new).tolist():
        starts_new[index] = not np.array_equal(prompts[index], prompts[index - 1])
    return np.flatnonzero(starts_new).astype(np.int64)


def _joined_ids(
    row_id: NDArray[np.bytes_], firsts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.bytes_]:
    digests = [
        hashlib.blake2b(row_id[start:stop].tobytes(), digest_size=16).digest()
        for start, stop in zip(firsts.tolist(), stops.tolist(), strict=True)
    ]
    return np.frombuffer(b"".join(digests), dtype="S16")
