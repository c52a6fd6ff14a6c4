"""Encoded rows as a table, with the hashes that name rows, prompts and completions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schemas.columns import Ragged, offsets_of, packed
from ...schemas.row_table import Rows, bytes_of, digest_of, keys_of, sources
from ...schemas.rows import CONTENT_JSON, Text, TextRow, prompt_digest


@dataclass(frozen=True)
class EncodedRow:
    """One row as token ids, truncated and with its special tokens."""

    text_row: TextRow
    prompt: list[int]
    prompt_cut: int
    completions: tuple[list[int], ...]
    cut: tuple[int, ...]
    learned: tuple[NDArray[np.int16] | None, ...]  # a mask per completion; None: all learned
    notes: tuple[str, ...] = ()  # peculiarities to be counted


def key_rows(encoded: Sequence[EncodedRow], *, carried: Sequence[str]) -> Rows:
    """Encoded rows as a table, with the hashes of rows, prompts and completions."""
    text_rows = [row.text_row for row in encoded]
    keys, split_keys = prompt_keys_of(text_rows), split_keys_of([one.prompt for one in text_rows])
    prompts, prompt_bytes = _flat([row.prompt for row in encoded])
    completions, contents = _flat([ids for row in encoded for ids in row.completions])
    offsets = offsets_of(np.array([len(row.completions) for row in encoded], np.int64))
    masks = [
        None if mask is None or mask.all() else mask for row in encoded for mask in row.learned
    ]
    digests = [digest_of(content) for content in contents]
    learned_digests = [
        digest if mask is None else digest_of(bytes_of(content, mask))
        for digest, content, mask in zip(digests, contents, masks, strict=True)
    ]
    roles = bytes([role for row in text_rows for role in row.roles])
    scores = array("d", [nan if s is None else s for row in text_rows for s in row.scores])
    ends, score_bytes, key_bytes = offsets.tolist(), scores.tobytes(), keys.tobytes()
    ids = [
        row_digest(
            key_bytes[16 * index : 16 * index + 16] + prompt_bytes[index],
            learned_digests[start:stop],
            roles=roles[start:stop],
            scores=score_bytes[8 * start : 8 * stop],
            carried=array("d", row.carried.values()).tobytes(),
        ).hex()
        for index, (row, (start, stop)) in enumerate(zip(text_rows, pairwise(ends), strict=True))
    ]
    numbers = np.array([row.row for row in text_rows], np.int64)
    rows = {
        "row_id": ids,
        "source": sources([row.file for row in text_rows], numbers),
        "prompt_key": keys,
        "split_key": split_keys,
        "prompt_ids": prompts,
        "prompt_cut": np.array([row.prompt_cut for row in encoded], np.int32),
        **{name: np.array([row.carried[name] for row in text_rows]) for name in carried},
    }
    is_several = np.array([mask is not None for mask in masks], np.bool_)
    columns = {
        "completion_ids": completions,
        "role": np.frombuffer(roles, np.int8),
        "score": np.frombuffer(scores, np.float64),
        "cut": np.array([cut for row in encoded for cut in row.cut], np.int32),
        "completion_turns": packed(
            Ragged.of([() if mask is None else mask for mask in masks], np.int16), is_several
        ),
        "completion_key": keys_of(digests),
    }
    return Rows.of(rows, columns, offsets)


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
    """A 16-byte hash of a row's content, without its file and row number."""
    head = b"%d,%d,%d,%d;" % (len(prompt), len(completion_digests), len(scores), len(carried))
    return digest_of(b"".join((head, prompt, *completion_digests, roles, scores, carried)))


def prompt_keys_of(text_rows: Sequence[TextRow]) -> NDArray[np.bytes_]:
    """The digest of each row's prompt, S16."""
    each = (prompt_digest(one.prompt, one.tools, one.template_options) for one in text_rows)
    return np.frombuffer(b"".join(each), dtype="S16")


def split_keys_of(prompts: Sequence[Text]) -> NDArray[np.uint64]:
    """The keys that decide whether prompts are held out.

    Prompts that differ only in white space, system message, tools or options have one key.
    """
    keys = bytearray()
    for prompt in prompts:
        text: Any = prompt
        if not isinstance(prompt, str):  # system messages count if there are no others
            text = [each for each in prompt if each["role"] != "system"] or prompt
        content = CONTENT_JSON.encode(_folded(text)).encode()
        keys += blake2b(content, digest_size=8, person=b"align held out").digest()
    return np.frombuffer(keys, dtype="<u8").astype(np.uint64)


def _folded(value: Any) -> Any:
    """The value with each run of white space as one blank, stripped."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, dict):
        return {key: _folded(entry) for key, entry in value.items()}
    return [_folded(entry) for entry in value] if isinstance(value, list | tuple) else value
