"""Key ranges: writes encoded rows divided by range, and reads the rows of one range from all files.

An encoded slice of the data is an Arrow IPC file with a record batch for each portion of the slice
and each key range with rows in it. The slice's record holds the number of rows of each, so the
batches need no names. A shard is one key range, or a few neighbouring ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.columns import bytes_of_texts
from ...schemas.errors import damaged
from ...schemas.row_table import ID_DIGITS, Rows, sources
from ...schemas.rows import Rejected, Role
from .long_form import merge_same_prompts

# The size of a portion in tokens; each completion counts as some more, for its other columns.
TOKENS_PER_PORTION = 4 * 1024 * 1024
TOKENS_PER_COMPLETION = 40

BYTES_PER_RANGE = 512 << 10  # of data: about 10,000 of the shortest rows, in memory at once
MOST_RANGES = 1024  # a batch costs as much as ten rows: more ranges would be slower
ROWS_PER_SHARD = 1000  # at least, approximately
FILES_OPEN = 256

REMEDY = "Remove it and run the same command again: no finished shard is lost."


def number_of_ranges(data_bytes: int, asked: int) -> int:
    """The number of key ranges for so many bytes of data."""
    if asked:
        return asked
    return min(MOST_RANGES, 1 << (max(0, data_bytes - 1) // BYTES_PER_RANGE).bit_length())


def number_of_shards(ranges: int, rows: int, asked: int) -> int:
    """The number of shards; neighbouring ranges are joined until each has enough rows."""
    if asked:
        return ranges
    return min(ranges, 1 << max(0, (rows // ROWS_PER_SHARD).bit_length() - 1))


def range_of(keys: NDArray[np.uint64], ranges: int) -> NDArray[np.int64]:
    """The range of each key; all ranges have equal width."""
    return ((keys >> np.uint64(32)) * np.uint64(ranges) >> np.uint64(32)).astype(np.int64)


@dataclass(frozen=True)
class EncodedSlice:
    """The record of an encoded slice of the data; written once the slice is complete."""

    counts: tuple[tuple[int, ...], ...]  # usable rows of each portion and range
    completions: int
    prompt_tokens: int
    completion_tokens: int
    largest_prompt: tuple[str, int]  # its key in hex, and its number of completions
    texts: tuple[str, str]  # the lowest and the highest completion key
    bytes: int  # of the file
    rows_in: tuple[int, ...]  # rows read, good and bad, of each data file in the slice
    notes: dict[str, int]
    reasons: dict[str, int]  # why rows cannot be used -> rows
    rejected: tuple[Rejected, ...]  # up to a limit; rows count from the slice's first


def write_slice(sink: BufferedIOBase, chunks: Iterable[Rows], ranges: int) -> dict[str, Any]:
    """Writes a batch for each portion and range with rows; returns the record's counts of them."""
    counts, prompts, texts = list[tuple[int, ...]](), [np.empty(0, np.uint64)], list[int]()
    tokens: NDArray[np.int64] = np.zeros(2, np.int64)  # of prompts, and of completions
    writer = None
    for portion in _portions(chunks):
        rows = Rows.concat(portion)
        portion.clear()  # so that no row is held three times
        number = range_of(rows.range_keys, ranges)
        counts.append(tuple(np.bincount(number, minlength=ranges).tolist()))
        prompts.append(rows.range_keys[rows.row_of_completion])
        texts += [int(rows.completion_key.min()), int(rows.completion_key.max())]
        tokens += (len(rows.prompts.values), len(rows.completions.values))
        batch = rows.take(np.argsort(number.astype(np.uint16), kind="stable")).to_batch()
        writer = writer or pa.ipc.new_file(sink, batch.schema)
        start = 0
        for count in filter(None, counts[-1]):
            writer.write_batch(batch.slice(start, count))
            start += count
    if writer:
        writer.close()
    keys, uses = np.unique(np.concatenate(prompts), return_counts=True)
    return {
        "counts": tuple(counts),
        "completions": int(uses.sum()),
        "prompt_tokens": int(tokens[0]),
        "completion_tokens": int(tokens[1]),
        "largest_prompt": (
            (f"{int(keys[uses.argmax()]):016x}", int(uses.max())) if counts else ("", 0)
        ),
        "texts": (f"{min(texts, default=2**64 - 1):016x}", f"{max(texts, default=0):016x}"),
    }


def _portions(chunks: Iterable[Rows]) -> Iterator[list[Rows]]:
    portion: list[Rows] = []
    tokens = 0
    for rows in filter(len, chunks):
        portion.append(rows)
        tokens += len(rows.completions.values) + len(rows.prompts.values)
        tokens += TOKENS_PER_COMPLETION * len(rows.completions)
        if tokens >= TOKENS_PER_PORTION:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


def majority_candidate(slices: Iterable[EncodedSlice]) -> str:
    """The key of the only prompt that may have more than half of all completions; "" if none.

    The majority vote of Boyer and Moore with weights: such a prompt has more than half in at least
    one slice.
    """
    prompt, lead = "", 0
    for one in slices:
        key, count = one.largest_prompt
        more = 2 * count - one.completions
        if more > 0 and key == prompt:
            lead += more
        elif more > lead:
            prompt, lead = key, more - lead
        elif more > 0:
            lead -= more
    return prompt


@dataclass(frozen=True)
class SliceFile:
    """An encoded slice: its file, its rows by portion and range, and the rows before it."""

    path: Path
    counts: NDArray[np.int32]  # (portions, ranges)
    first_row: int


class ShardReader:
    """Reads the rows of all encoded slices shard by shard, with a bounded number of open files."""

    def __init__(self, files: Sequence[SliceFile], shards: int, prompt_side: str | None) -> None:
        """With `prompt_side`, rows of one prompt are joined into one."""
        self._files, self._shards, self._prompt_side = files, shards, prompt_side
        self._opened = lru_cache(FILES_OPEN)(lambda path: pa.ipc.open_file(pa.OSFile(str(path))))

    def read(self, shard: int, notes: Counter[str]) -> Rows | None:
        """The rows of a shard in key order, each numbered in its data file; None without rows.

        Among rows of equal content, in the order of the data, the first has a plain id and the
        others end in -1, -2, ...
        """
        batches: list[pa.RecordBatch] = []
        lengths: list[int] = []
        for file in self._files:
            try:
                found = self._batches(file, shard)
            except (pa.ArrowException, OSError) as error:
                raise damaged(file.path, str(error).partition("\n")[0], REMEDY) from error
            batches += found
            lengths.append(sum(map(len, found)))
        if not batches:
            return None
        rows = Rows.of_batches(batches)
        del batches, found  # so that no row is held three times
        first_rows = np.repeat([file.first_row for file in self._files], lengths)
        names = rows.of_rows.column("source").field("file")
        rows = rows.with_columns(source=sources(names, rows.row + first_rows)).in_key_order()
        notes["pairs_in_both_orders"] += _in_both_orders(rows)
        if self._prompt_side:
            rows = merge_same_prompts(rows, notes, prompt_side=self._prompt_side)
        return _with_copies_numbered(rows, notes)

    def completions_of(self, key: int) -> int:
        """The number of completions of a prompt."""
        keys = np.array([key], np.uint64)
        rows = self.read(int(range_of(keys, self._shards)[0]), Counter())
        return int(np.diff(rows.completion_offsets)[rows.range_keys == keys].sum()) if rows else 0

    def _batches(self, file: SliceFile, shard: int) -> list[pa.RecordBatch]:
        wide = file.counts.shape[1] // self._shards
        is_there = file.counts > 0
        # Batches without rows were not written: the index skips them.
        index = (np.cumsum(is_there) - 1).reshape(is_there.shape)
        own = slice(shard * wide, (shard + 1) * wide)
        wanted = index[:, own][is_there[:, own]].tolist()
        return [self._opened(file.path).get_batch(number) for number in wanted]


def _with_copies_numbered(rows: Rows, notes: Counter[str]) -> Rows:
    digests = np.frombuffer(bytes_of_texts(rows.of_rows.column("row_id")), f"S{ID_DIGITS}")
    is_copy = digests[1:] == digests[:-1]
    notes["rows_that_repeat_another_row"] += int(is_copy.sum())
    if not is_copy.any():
        return rows
    copy, ids = 0, list(rows.ids())
    for index in np.flatnonzero(is_copy).tolist():
        copy = copy + 1 if index and is_copy[index - 1] else 1
        ids[index + 1] += f"-{copy}"
    return rows.with_columns(row_id=ids)


def _in_both_orders(rows: Rows) -> int:
    """The number of pairs of completions that appear in both orders of chosen and rejected."""
    starts = rows.completion_offsets[:-1][np.diff(rows.completion_offsets) == 2]
    firsts = starts[(rows.roles[starts] == Role.CHOSEN) & (rows.roles[starts + 1] == Role.REJECTED)]
    chosen, rejected = rows.completion_key[firsts], rows.completion_key[firsts + 1]
    prompts, is_turned = rows.range_keys[rows.row_of_completion[firsts]], chosen > rejected
    pairs = np.stack([prompts, np.minimum(chosen, rejected), np.maximum(chosen, rejected)])
    order = np.lexsort((is_turned, *pairs))
    pairs, is_turned = pairs[:, order], is_turned[order]
    is_same = (pairs[:, 1:] == pairs[:, :-1]).all(axis=0)
    return int((is_same & (is_turned[1:] != is_turned[:-1])).sum())
