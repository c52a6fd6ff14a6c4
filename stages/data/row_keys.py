"""Encoded records as rows, with the hashes that name rows, prompts and completions.

Token ids do not identify a prompt: if its end falls inside a token, the ids of one prompt depend
on how its completion begins.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schemas.columns import Ragged, offsets_of, packed
from ...schemas.row_table import LEARNED, Rows, bytes_of, digest_of, keys_of, sources
from ...schemas.rows import Record


@dataclass(frozen=True)
class EncodedRecord:
    """One record as token ids, truncated and with its special tokens."""

    record: Record
    prompt: list[int]
    prompt_cut: int
    completions: tuple[list[int], ...]
    cut: tuple[int, ...]
    turns: tuple[NDArray[np.int16] | None, ...]  # of each completion; None: one turn, all learned


def key_rows(encoded: Sequence[EncodedRecord], *, carried: Sequence[str]) -> Rows:
    """Encoded records as rows, with the hashes of rows, prompts and completions."""
    records = [row.record for row in encoded]
    keys = prompt_keys_of(records)
    prompts, prompt_bytes = _flat([row.prompt for row in encoded])
    completions, contents = _flat([ids for row in encoded for ids in row.completions])
    offsets = offsets_of(np.array([len(row.completions) for row in encoded], np.int64))
    turns = [
        None if each is None or (each == LEARNED).all() else each
        for row in encoded
        for each in row.turns
    ]
    digests = [digest_of(content) for content in contents]
    told = [
        digest if each is None else digest_of(bytes_of(content, each))
        for digest, content, each in zip(digests, contents, turns, strict=True)
    ]
    roles = bytes([role for record in records for role in record.roles])
    scores = array("d", [nan if s is None else s for record in records for s in record.scores])
    ends, score_bytes, key_bytes = offsets.tolist(), scores.tobytes(), keys.prompt.tobytes()
    ids = [
        row_digest(
            key_bytes[16 * index : 16 * index + 16] + prompt_bytes[index],
            told[start:stop],
            roles=roles[start:stop],
            scores=score_bytes[8 * start : 8 * stop],
            carried=array("d", record.carried.values()).tobytes(),
        ).hex()
        for index, (record, (start, stop)) in enumerate(zip(records, pairwise(ends), strict=True))
    ]
    numbers = np.array([record.row for record in records], np.int64)
    rows = {
        "row_id": ids,
        "source": sources([record.file for record in records], numbers),
        "prompt_key": keys.prompt,
        "split_key": keys.split,
        "prompt_ids": prompts,
        "prompt_cut": np.array([row.prompt_cut for row in encoded], np.int32),
        **{name: np.array([record.carried[name] for record in records]) for name in carried},
    }
    is_several = np.array([each is not None for each in turns], np.bool_)
    branches = {
        "completion_ids": completions,
        "role": np.frombuffer(roles, np.int8),
        "score": np.frombuffer(scores, np.float64),
        "cut": np.array([cut for row in encoded for cut in row.cut], np.int32),
        "completion_turns": packed(
            Ragged.of([() if each is None else each for each in turns], np.int16), is_several
        ),
        "completion_key": keys_of(digests),
    }
    return Rows.of(rows, branches, offsets)


def _flat(lists: Sequence[list[int]]) -> tuple[Ragged, list[bytes]]:
    """Lists of token ids end to end, and the bytes of each."""
    values = array("i")
    for one in lists:
        values.fromlist(one)
    offsets = offsets_of(np.fromiter(map(len, lists), np.int64, len(lists)))
    content = values.tobytes()
    ends = (offsets * values.itemsize).tolist()
    ids = np.frombuffer(content, np.int32)
    return Ragged(ids, offsets), [content[start:stop] for start, stop in pairwise(ends)]


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
    return digest_of(b"".join((head, prompt, *completion_digests, roles, scores, carried)))


_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=repr)


class PromptKeys(NamedTuple):
    """Numbers that identify each record's prompt by its text, not by its token ids."""

    prompt: NDArray[np.bytes_]  # S16
    split: NDArray[np.uint64]


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
