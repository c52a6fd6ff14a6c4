"""Chooses the KL partners: the mismatched completions, which come from other rows.

Completions are numbered along the ring. The ring is cut into blocks at positions that only the
rows' own hashes decide, so that an added row changes partners near itself and nowhere else. Inside
a block, partner k of completion j is the one `shift_k` further on, round the block's end.
Completions of one prompt are together in a run of at most `longest`; a shift between `longest` and
`size - longest` therefore never lands in the run it started from, and every shift is a permutation.
Equal completions under different prompts are swapped apart afterwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schemas.columns import offsets_of
from ...schemas.errors import BadDataError

PROMPTS_PER_BLOCK = 64  # on average
SMALLEST_BLOCK = 64  # completions
SEARCH_WINDOW = 256  # completions looked at together when another partner is searched
MOST_SWAPPED = 8192  # completions looked at for one to exchange partners with
SPAN = 65536  # completions whose keys and partners are held at once

Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class Repeats:
    """Counts of mismatched completions that are used more than once."""

    used_twice: int  # partners used more than once, because the counts allow no permutation
    met_again: int  # partners a completion has under two different k


def choose_partners(
    prompt_keys: Keys,
    completion_keys: Keys,
    partners: Sequence[NDArray[np.int64]],
    *,
    forget: Callable[[], object] = lambda: None,
) -> Repeats:
    """Fills `partners`, for each k, with the mismatch of every completion; keys in ring order.

    A span of completions is worked on at a time, for arrays that are mapped files; `forget` is
    called after each.
    """
    if not partners or not len(prompt_keys):
        return Repeats(0, 0)
    blocks = _blocks(prompt_keys, forget)
    used_twice = 0
    for k, row in enumerate(partners):
        _shift_along(row, blocks, k, forget)
        for start, stop in _spans(len(row)):
            used_twice += _separate(row, start, stop, prompt_keys, completion_keys)
            forget()
    met_again = 0
    for start, stop in _spans(len(prompt_keys)):
        rows = np.stack([row[start:stop] for row in partners])
        met_again += sum(int((rows[:k] == rows[k]).any(axis=0).sum()) for k in range(len(rows)))
        forget()
    return Repeats(used_twice, met_again)


def _spans(total: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, SPAN):
        yield start, min(start + SPAN, total)


@dataclass(frozen=True)
class _Block:
    start: int
    stop: int
    longest: int  # most completions of one prompt


class _Blocks:
    """Blocks one after another, in 24 bytes each."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def __len__(self) -> int:
        return len(self._numbers) // 3

    def __iter__(self) -> Iterator[_Block]:
        for start in range(0, len(self._numbers), 3):
            yield _Block(*self._numbers[start : start + 3])

    def append(self, block: _Block) -> None:
        self._numbers.extend((block.start, block.stop, block.longest))

    def pop(self) -> _Block:
        last = _Block(*self._numbers[-3:])
        del self._numbers[-3:]
        return last


def _blocks(prompt_keys: Keys, forget: Callable[[], object]) -> _Blocks:
    """Blocks that begin where a prompt's own hash says so and are long enough for many shifts."""
    blocks = _Blocks()
    pending: _Block | None = None
    largest = 0
    for piece in _pieces(prompt_keys, forget):
        largest = max(largest, piece.longest)
        pending = _joined(pending, piece) if pending else piece
        if pending.stop - pending.start >= max(SMALLEST_BLOCK, 4 * pending.longest):
            blocks.append(pending)
            pending = None
    _require_other_prompts(largest, len(prompt_keys))
    while pending and len(blocks) and pending.stop - pending.start < 4 * pending.longest:
        pending = _joined(blocks.pop(), pending)
    if pending:
        blocks.append(pending)
    return blocks


def _require_other_prompts(largest: int, total: int) -> None:
    if 2 * largest > total:
        raise BadDataError(
            f"One prompt holds {largest} of all {total} completions, so they cannot all be paired "
            "with another prompt's completion (KTO's mismatched pairs). "
            "Add rows with other prompts, or pass --kl-pairs 0."
        )


def _pieces(prompt_keys: Keys, forget: Callable[[], object]) -> Iterator[_Block]:
    """The completions between one prompt whose hash opens a block and the next."""
    piece: _Block | None = None
    for start, stop in _spans_of_whole_runs(prompt_keys):
        keys = prompt_keys[start:stop]
        runs = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        lengths = np.diff(np.append(runs, len(keys)))
        opens = keys[runs] % np.uint64(PROMPTS_PER_BLOCK) == 0
        goes_on = piece is not None and not opens[0]
        opens[0] = True
        first_runs = np.flatnonzero(opens)
        longest = np.maximum.reduceat(lengths, first_runs).tolist()
        edges = [*(start + runs[first_runs]).tolist(), stop]
        for begin, end, most in zip(edges[:-1], edges[1:], longest, strict=True):
            found = _Block(begin, end, most)
            if piece and goes_on:
                found = _joined(piece, found)
            elif piece:
                yield piece
            piece, goes_on = found, False
        forget()
    if piece:
        yield piece


def _spans_of_whole_runs(prompt_keys: Keys) -> Iterator[tuple[int, int]]:
    """Spans that no prompt's completions straddle."""
    start, total = 0, len(prompt_keys)
    while start < total:
        stop = min(start + SPAN, total)
        last = prompt_keys[stop - 1]
        while stop < total:
            same = prompt_keys[stop : stop + SPAN] == last
            stop += len(same) if same.all() else int(np.argmin(same))
            if not same.all():
                break
        yield start, stop
        start = stop


def _shift_along(
    partner: NDArray[np.int64], blocks: _Blocks, k: int, forget: Callable[[], object]
) -> None:
    """Pairs every completion with the one at the k-th shift in its block."""
    for block in blocks:
        shift, size = _shift(block, k), block.stop - block.start
        for first, last in _spans(size):
            shifted = block.start + (np.arange(first, last) + shift) % size
            partner[block.start + first : block.start + last] = shifted
        if block.start // SPAN != block.stop // SPAN:
            forget()


def _joined(first: _Block, second: _Block) -> _Block:
    return _Block(first.start, second.stop, max(first.longest, second.longest))


def _shift(block: _Block, k: int) -> int:
    """The k-th of all allowed shifts: multiples of the longest run first, then those between."""
    step, most = block.longest, block.stop - block.start - block.longest
    per_offset = [(most - (step + offset)) // step + 1 for offset in range(min(step, most))]
    ends = offsets_of(np.maximum(np.array(per_offset), 0))
    index = k % int(ends[-1])
    offset = int(np.searchsorted(ends, index, side="right")) - 1
    return step + offset + step * (index - int(ends[offset]))


def _separate(
    partner: NDArray[np.int64], start: int, stop: int, prompt_keys: Keys, completion_keys: Keys
) -> int:
    """Swaps partners until none has its own text; returns how many had to be used twice."""
    used_twice = 0
    alike = completion_keys[partner[start:stop]] == completion_keys[start:stop]
    for index in (start + np.flatnonzero(alike)).tolist():
        mine = int(partner[index])
        if completion_keys[mine] != completion_keys[index]:
            continue  # an earlier swap fixed it already
        other = _swappable(index, partner, prompt_keys, completion_keys)
        if other is not None:
            partner[index], partner[other] = partner[other], mine
        else:
            partner[index] = _any_partner(index, prompt_keys, completion_keys)
            used_twice += 1
    return used_twice


def _swappable(
    index: int, partner: NDArray[np.int64], prompt_keys: Keys, completion_keys: Keys
) -> int | None:
    """The nearest completion further on that can exchange partners with `index`."""
    mine = partner[index]

    def fits(near: NDArray[np.int64]) -> NDArray[np.bool_]:
        theirs = partner[near]
        both: NDArray[np.bool_] = (
            (prompt_keys[theirs] != prompt_keys[index])
            & (completion_keys[theirs] != completion_keys[index])
            & (prompt_keys[mine] != prompt_keys[near])
            & (completion_keys[mine] != completion_keys[near])
        )
        return both

    return first_after(index, len(partner), fits, most=MOST_SWAPPED)


def _any_partner(index: int, prompt_keys: Keys, completion_keys: Keys) -> int:
    """The nearest completion further on with another prompt and another text."""

    def fits(near: NDArray[np.int64]) -> NDArray[np.bool_]:
        differs: NDArray[np.bool_] = (prompt_keys[near] != prompt_keys[index]) & (
            completion_keys[near] != completion_keys[index]
        )
        return differs

    found = first_after(index, len(prompt_keys), fits, most=len(prompt_keys))
    if found is None:
        raise BadDataError(
            "Every completion of the other prompts is the same text, so a mismatched pair (KTO's "
            "KL term) would not be a mismatch. Add rows with other completions, or pass "
            "--kl-pairs 0."
        )
    return found


def first_after(
    index: int,
    total: int,
    fits: Callable[[NDArray[np.int64]], NDArray[np.bool_]],
    *,
    most: int,
) -> int | None:
    """The nearest of the `most` completions further on the ring that fits."""
    stop = min(total, 1 + most)
    for first in range(1, stop, SEARCH_WINDOW):
        near = (index + np.arange(first, min(first + SEARCH_WINDOW, stop))) % total
        found = near[fits(near)]
        if len(found):
            return int(found[0])
    return None
