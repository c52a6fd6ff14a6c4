"""Keys of rows and prompts: encoded records as columns, and their hashes.

Token ids do not identify a prompt: if its end falls inside a token, the ids of one prompt depend
on how its completion begins.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .columns import ColumnTable, Ragged, column, offsets_of
from .rows import PromptKeys, Record, Rejected, RowBlock, bytes_of
from .turns import WHOLE


@dataclass(frozen=True)
class EncodedRecord:
    """One record as token ids, truncated and with its special tokens."""

    record: Record
    prompt: list[int]
    prompt_cut: int
    completions: tuple[list[int], ...]
    cut: tuple[int, ...]
    turns: tuple[NDArray[np.int16] | None, ...]  # of each completion; None: one turn, all learned


@dataclass(frozen=True)
class KeyedRows(ColumnTable):
    """Rows with the keys of their completions, in any order or in key order."""

    rows: RowBlock = column("row", within=RowBlock)
    completion_keys: NDArray[np.uint64] = column("branch", "u8")  # hash of its ids

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def keys(self) -> NDArray[np.uint64]:
        """The key of each row: the first eight bytes of its prompt's hash, as a number."""
        halves = np.ascontiguousarray(self.rows.prompt_keys.prompt).view(">u8").reshape(-1, 2)
        return halves[:, 0].astype(np.uint64)

    def in_key_order(self) -> KeyedRows:
        """The rows sorted by key, then by their digest; equal rows by file and number."""
        rows = self.rows
        halves = np.ascontiguousarray(rows.row_id).view(">u8").reshape(-1, 2)
        order = np.lexsort((rows.row, rows.file, halves[:, 1], halves[:, 0], self.keys))
        return self.take(order)


def key_rows(encoded: Sequence[EncodedRecord], *, carried: Sequence[str]) -> KeyedRows:
    """Encoded records as columns, with the hashes of rows, prompts and completions."""
    completions = Ragged.of([ids for row in encoded for ids in row.completions], np.int32)
    turns = _turns(completions, [each for row in encoded for each in row.turns])
    records = [row.record for row in encoded]
    prompt_keys = prompt_keys_of(records)
    offsets = offsets_of(np.array([len(row.completions) for row in encoded], dtype=np.int64))
    digests = [_digest(ids.tobytes(), size=16) for ids in completions]
    told = (
        digests
        if turns is None
        else [_digest(bytes_of(*both), size=16) for both in zip(completions, turns, strict=True)]
    )
    rows = RowBlock(
        row_id=_row_ids(encoded, prompt_keys.prompt.tobytes(), told, offsets),
        copy=np.zeros(len(encoded), dtype=np.int32),
        file=np.array([record.file for record in records], dtype=np.uint64),
        row=np.array([record.row for record in records], dtype=np.int64),
        prompt_keys=prompt_keys,
        prompts=Ragged.of([row.prompt for row in encoded], np.int32),
        prompt_cut=np.array([row.prompt_cut for row in encoded], dtype=np.int32),
        branch_offsets=offsets,
        completions=completions,
        roles=np.array([role for record in records for role in record.roles], dtype=np.int8),
        scores=np.array(
            [_number(s) for record in records for s in record.scores], dtype=np.float64
        ),
        cut=np.array([cut for row in encoded for cut in row.cut], dtype=np.int32),
        carried={
            name: np.array([record.carried[name] for record in records], dtype=np.float64)
            for name in carried
        },
        turns=turns,
    )
    return KeyedRows(rows, np.frombuffer(b"".join(digests), dtype=np.uint64)[::2].copy())


def _turns(completions: Ragged, turns: Sequence[NDArray[np.int16] | None]) -> Ragged | None:
    """The turns of all completions; None if each is one turn that is all learned."""
    if all(each is None for each in turns):
        return None
    numbers = np.full(len(completions.values), WHOLE, dtype=np.int16)
    for branch, each in enumerate(turns):
        if each is not None:
            numbers[completions.offsets[branch] : completions.offsets[branch + 1]] = each
    return Ragged(numbers, completions.offsets)


def completion_keys(completions: Iterable[NDArray[np.int32]]) -> NDArray[np.uint64]:
    """The keys of completions, as in `key_rows`."""
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
    """A hash of sixteen bytes of the row's content, without its file and row number."""
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


def _number(score: float | None) -> float:
    return nan if score is None else score


def _digest(content: bytes, *, size: int) -> bytes:
    return hashlib.blake2b(content, digest_size=size).digest()


@dataclass(frozen=True)
class EncodedChunk:
    """The rows of one chunk, its rejected rows, and its notes."""

    file: int  # index of its input file
    keyed: KeyedRows
    rejected: list[Rejected]
    notes: Mapping[str, int]


# A file of nothing but bad rows must not fill the disk with their descriptions.
MOST_REJECTED_KEPT = 100_000


@dataclass
class InputCounts:
    """Counts of the input's rows, and the first of the rejected ones."""

    rows_per_file: Counter[int] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    rejected: list[Rejected] = field(default_factory=list)  # by file, then by row

    @property
    def rows_in(self) -> int:
        """The number of rows read, good and bad."""
        return self.rows_per_file.total()

    def count(self, chunk: EncodedChunk) -> None:
        """Adds the counts of one chunk."""
        self.rows_per_file[chunk.file] += len(chunk.keyed) + len(chunk.rejected)
        self.notes.update(chunk.notes)
        self.reasons.update(rejected.reason for rejected in chunk.rejected)
        self.keep(chunk.rejected)

    def keep(self, rejected: Iterable[Rejected]) -> None:
        """Adds rejected rows to those that are kept."""
        self.rejected.extend(rejected)
        self.rejected.sort(key=lambda one: (one.file, one.row))
        del self.rejected[MOST_REJECTED_KEPT:]


_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=repr)


def prompt_keys_of(records: Sequence[Record]) -> PromptKeys:
    """The keys of each record's prompt.

    `prompt` is a digest of the whole prompt: its text, or its messages with the system message,
    the tools and the template's options. `split` leaves out the system message, tools and options,
    and folds white space.
    """
    whole = b"".join(_prompt_digest(_canonical(record), 16, b"align prompt") for record in records)
    split = b"".join(
        _prompt_digest(_normalised(record), 8, b"align held out") for record in records
    )
    return PromptKeys(
        prompt=np.frombuffer(whole, dtype="S16"),
        split=np.frombuffer(split, dtype="<u8").astype(np.uint64),
    )


def _canonical(record: Record) -> str:
    if isinstance(record.prompt, str):  # without tools and options; encoding a text alone is quick
        return f"[{_JSON.encode(record.prompt)},null,{{}}]"
    return _JSON.encode([record.prompt, record.tools, record.template_options])


def _normalised(record: Record) -> str:
    if isinstance(record.prompt, str):
        return _JSON.encode(_folded(record.prompt))
    return _JSON.encode([_folded(message) for message in _without_system(record)])


def _without_system(record: Record) -> Sequence[Mapping[str, Any]]:
    """The messages without the system's; all of them if there are no others."""
    assert not isinstance(record.prompt, str)
    return [each for each in record.prompt if each["role"] != "system"] or record.prompt


def _folded(value: Any) -> Any:
    """The value with each run of white space as one blank, and none at the ends."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, dict):
        return {key: _folded(entry) for key, entry in value.items()}
    return [_folded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _prompt_digest(text: str, size: int, purpose: bytes) -> bytes:
    return blake2b(text.encode(), digest_size=size, person=purpose).digest()
