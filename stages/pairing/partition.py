"""Key ranges: encoded rows are written divided by them, and the rows of one are read out of all.

An encoded slice of the data is an Arrow IPC file with a record batch for each portion of the slice
and each key range that has rows there. Its record counts these rows, and so says which batch is
which. A shard is one key range, or a few neighbouring ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BufferedIOBase
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.errors import damaged
from ...schemas.row_keys import KeyedRows
from ...schemas.rows import Rejected, Role
from .long_form import merge_same_prompts
from .record_batches import from_batch, to_batch

# Rows that are divided at once, by the tokens that they weigh: short rows are mostly columns.
TOKENS_PER_PORTION = 4 * 1024 * 1024
TOKENS_PER_BRANCH = 40

BYTES_PER_RANGE = 2 << 20  # of data
MOST_RANGES = 1024  # a batch costs as much as ten rows, so more ranges would be slower
ROWS_PER_SHARD = 1000  # at least, about
FILES_OPEN = 256

REMEDY = "Remove it and run the same command again: no finished shard is lost."


def number_of_ranges(data_bytes: int, asked: int = 0) -> int:
    """How many key ranges the rows of so much data are divided into."""
    if asked:
        return asked
    return min(MOST_RANGES, 1 << (max(0, data_bytes - 1) // BYTES_PER_RANGE).bit_length())


def number_of_shards(ranges: int, rows: int, asked: int = 0) -> int:
    """How many shards there are: neighbouring ranges are joined until each has enough rows."""
    if asked:
        return ranges
    return min(ranges, 1 << max(0, (rows // ROWS_PER_SHARD).bit_length() - 1))


def range_of(keys: NDArray[np.uint64], ranges: int) -> NDArray[np.int64]:
    """The range of each key; all ranges are equally wide."""
    return ((keys >> np.uint64(32)) * np.uint64(ranges) >> np.uint64(32)).astype(np.int64)


@dataclass(frozen=True)
class EncodedSlice:
    """The record of an encoded slice of the data; once it is there, the slice is encoded."""

    bytes: int  # of its file
    counts: tuple[tuple[int, ...], ...]  # rows of each portion and range
    rows_in: tuple[int, ...]  # rows read, good and bad, of each file of data in the slice
    notes: dict[str, int]
    reasons: dict[str, int]  # why rows cannot be used -> rows
    rejected: tuple[Rejected, ...]  # up to a limit; rows count from the slice's first
    completions: int
    prompt_tokens: int
    completion_tokens: int
    largest_prompt: tuple[str, int]  # its key in hex, and its completions
    texts: tuple[str, str]  # the lowest and the highest key of a completion


def write_slice(sink: BufferedIOBase, chunks: Iterable[KeyedRows], ranges: int) -> SliceFacts:
    """Writes a batch for each portion and range that has rows."""
    facts, writer = SliceFacts(), None
    for portion in _portions(chunks):
        rows = KeyedRows.concat(portion)
        portion.clear()  # so that no row is held three times
        number = range_of(rows.keys, ranges)
        facts.add(rows, np.bincount(number, minlength=ranges))
        batch = to_batch(rows.take(np.argsort(number.astype(np.uint16), kind="stable")))
        writer = writer or pa.ipc.new_file(sink, batch.schema)
        start = 0
        for count in filter(None, facts.counts[-1]):
            writer.write_batch(batch.slice(start, count))
            start += count
    if writer:
        writer.close()
    return facts


class SliceFacts:
    """What the record of a slice says of its usable rows."""

    def __init__(self) -> None:
        self.counts: list[list[int]] = []
        self.completions = self.prompt_tokens = self.completion_tokens = 0
        self.lowest, self.highest = 2**64 - 1, 0
        self._prompts: list[NDArray[np.uint64]] = []

    def add(self, keyed: KeyedRows, counts: NDArray[np.int64]) -> None:
        """Counts the rows of one portion."""
        rows = keyed.rows
        self.counts.append(counts.tolist())
        self.completions += len(rows.completions)
        self.prompt_tokens += len(rows.prompts.values)
        self.completion_tokens += len(rows.completions.values)
        self.lowest = min(self.lowest, int(keyed.completion_keys.min(initial=self.lowest)))
        self.highest = max(self.highest, int(keyed.completion_keys.max(initial=self.highest)))
        self._prompts.append(keyed.keys[rows.row_of_branch])

    @property
    def largest_prompt(self) -> tuple[str, int]:
        """The key of the prompt with the most completions, in hex, and how many it has."""
        if not self.completions:
            return "", 0
        keys, counts = np.unique(np.concatenate(self._prompts), return_counts=True)
        at = int(counts.argmax())
        return f"{int(keys[at]):016x}", int(counts[at])


def _portions(chunks: Iterable[KeyedRows]) -> Iterator[list[KeyedRows]]:
    portion: list[KeyedRows] = []
    tokens = 0
    for keyed in filter(len, chunks):
        portion.append(keyed)
        rows = keyed.rows
        tokens += len(rows.completions.values) + len(rows.prompts.values)
        tokens += TOKENS_PER_BRANCH * len(rows.completions)
        if tokens >= TOKENS_PER_PORTION:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


def likeliest_majority(slices: Iterable[EncodedSlice]) -> str:
    """The only prompt, by its key, that may have more than half of all completions; "" if none.

    In one slice at least such a prompt has more than half, and what it lacks in others cancels out.
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
    """An encoded slice: its file, rows by portion and range, and the file's rows ahead of it."""

    path: Path
    counts: NDArray[np.int32]  # (portions, ranges)
    first_row: int


class EncodedRows:
    """The rows of all encoded slices, read shard by shard; a bounded number of files is open."""

    def __init__(self, files: Sequence[SliceFile], shards: int, prompt_side: str | None) -> None:
        """With `prompt_side`, rows of one prompt are joined into one."""
        self._files, self._shards, self._prompt_side = files, shards, prompt_side
        self._opened = lru_cache(FILES_OPEN)(lambda path: pa.ipc.open_file(pa.OSFile(str(path))))

    def read(self, shard: int, notes: Counter[str]) -> KeyedRows | None:
        """The rows of a shard in key order, each numbered in its file of data; None without any.

        Rows of equal content are numbered 0, 1, 2, ... as copies, in the order of the data.
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
        joined = pa.Table.from_batches(batches).combine_chunks()
        del batches, found  # so that no row is held three times
        keyed = from_batch(KeyedRows, *joined.to_batches())
        del joined
        row = keyed.rows.row + np.repeat([file.first_row for file in self._files], lengths)
        keyed = replace(keyed, rows=replace(keyed.rows, row=row)).in_key_order()
        notes["pairs_in_both_orders"] += _in_both_orders(keyed)
        if self._prompt_side:
            keyed = merge_same_prompts(keyed, notes, prompt_side=self._prompt_side)
        return _with_copies_numbered(keyed, notes)

    def completions_of(self, key: int) -> int:
        """How many completions a prompt has."""
        keys = np.array([key], np.uint64)
        keyed = self.read(int(range_of(keys, self._shards)[0]), Counter())
        if keyed is None:
            return 0
        return int(np.diff(keyed.rows.branch_offsets)[keyed.keys == keys].sum())

    def _batches(self, file: SliceFile, shard: int) -> list[pa.RecordBatch]:
        wide = file.counts.shape[1] // self._shards
        is_there = file.counts > 0
        index = (np.cumsum(is_there) - 1).reshape(is_there.shape)
        own = slice(shard * wide, (shard + 1) * wide)
        wanted = index[:, own][is_there[:, own]].tolist()
        return [self._opened(file.path).get_batch(number) for number in wanted]


def _with_copies_numbered(keyed: KeyedRows, notes: Counter[str]) -> KeyedRows:
    row_id = keyed.rows.row_id
    is_first = np.append(True, row_id[1:] != row_id[:-1])
    index = np.arange(len(row_id))
    copy = index - np.maximum.accumulate(np.where(is_first, index, 0))
    notes["rows_that_repeat_another_row"] += int((~is_first).sum())
    return replace(keyed, rows=replace(keyed.rows, copy=copy.astype(np.int32)))


def _in_both_orders(keyed: KeyedRows) -> int:
    """How many pairs of completions are there as chosen and rejected and the other way round."""
    rows = keyed.rows
    starts = rows.branch_offsets[:-1][np.diff(rows.branch_offsets) == 2]
    firsts = starts[(rows.roles[starts] == Role.CHOSEN) & (rows.roles[starts + 1] == Role.REJECTED)]
    chosen, rejected = keyed.completion_keys[firsts], keyed.completion_keys[firsts + 1]
    prompts, is_turned = keyed.keys[rows.row_of_branch[firsts]], chosen > rejected
    pairs = np.stack([prompts, np.minimum(chosen, rejected), np.maximum(chosen, rejected)])
    order = np.lexsort((is_turned, *pairs))
    pairs, is_turned = pairs[:, order], is_turned[order]
    is_same = (pairs[:, 1:] == pairs[:, :-1]).all(axis=0)
    return int((is_same & (is_turned[1:] != is_turned[:-1])).sum())
