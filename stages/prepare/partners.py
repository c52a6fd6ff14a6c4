"""KL partners: which other row's completion stands in as a completion's mismatch.

Completions are numbered along the ring. The ring is cut into blocks at places that only the rows'
own hashes decide, so that an added row changes partners near itself and nowhere else. Inside a
block, partner k of completion j is the one `shift_k` further on, round the block's end. Completions
of one prompt lie together in a run of at most `longest`; a shift between `longest` and
`size - longest` therefore never lands in the run it started from, and every shift is a permutation.
Equal completions under different prompts are swapped apart afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.errors import BadDataError
from ...schemas.ragged import offsets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROMPTS_PER_BLOCK = 64  # on average
SMALLEST_BLOCK = 64  # completions
SEARCH_WINDOW = 1024  # completions looked at together when swapping


@dataclass(frozen=True)
class Partners:
    """For each k and completion, the completion that is its mismatch."""

    indices: NDArray[np.int64]  # (num_pairs, completions)
    repeated: int  # partners used more than once, because the counts allow no permutation
    met_again: int  # partners a completion has under two different k


def choose_partners(
    prompt_keys: NDArray[np.uint64], completion_keys: NDArray[np.uint64], *, num_pairs: int
) -> Partners:
    """Chooses `num_pairs` partners for every completion; keys are in ring order."""
    total = len(prompt_keys)
    indices = np.empty((num_pairs, total), dtype=np.int64)
    if num_pairs == 0 or total == 0:
        return Partners(indices, 0, 0)
    runs = _run_starts(prompt_keys)
    _require_room(np.diff(np.append(runs, total)), total)
    repeated = 0
    for block in _blocks(prompt_keys, runs):
        for k in range(num_pairs):
            shift = _shift(block, k)
            size = block.stop - block.start
            indices[k, block.start : block.stop] = block.start + (np.arange(size) + shift) % size
    for row in indices:
        repeated += _separate(row, prompt_keys, completion_keys)
    met_again = sum(int((indices[:k] == indices[k]).any(axis=0).sum()) for k in range(1, num_pairs))
    return Partners(indices, repeated, met_again)


@dataclass(frozen=True)
class _Block:
    start: int
    stop: int
    longest: int  # most completions of one prompt


def _run_starts(prompt_keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.flatnonzero(np.append(True, prompt_keys[1:] != prompt_keys[:-1])).astype(np.int64)


def _require_room(run_lengths: NDArray[np.int64], total: int) -> None:
    largest = int(run_lengths.max())
    if 2 * largest > total:
        raise BadDataError(
            f"One prompt holds {largest} of all {total} completions, so they cannot all be paired "
            "with another prompt's completion (KTO's mismatched pairs). "
            "Add rows with other prompts, or pass --kl-pairs 0."
        )


def _blocks(prompt_keys: NDArray[np.uint64], runs: NDArray[np.int64]) -> list[_Block]:
    """Blocks that begin where a prompt's own hash says so and leave room for many shifts."""
    total = len(prompt_keys)
    lengths = np.diff(np.append(runs, total))
    opens = prompt_keys[runs] % np.uint64(PROMPTS_PER_BLOCK) == 0
    opens[0] = True
    first_runs = np.flatnonzero(opens)
    longest = np.maximum.reduceat(lengths, first_runs)
    starts = runs[first_runs]
    stops = np.append(starts[1:], total)
    blocks: list[_Block] = []
    pending: _Block | None = None
    for start, stop, most in zip(starts.tolist(), stops.tolist(), longest.tolist(), strict=True):
        piece = _Block(start, stop, most)
        pending = _joined(pending, piece) if pending else piece
        if pending.stop - pending.start >= max(SMALLEST_BLOCK, 4 * pending.longest):
            blocks.append(pending)
            pending = None
    while pending and blocks and not _is_roomy(pending):
        pending = _joined(blocks.pop(), pending)
    return [*blocks, pending] if pending else blocks


def _is_roomy(block: _Block) -> bool:
    return block.stop - block.start >= 4 * block.longest


def _joined(first: _Block, second: _Block) -> _Block:
    return _Block(first.start, second.stop, max(first.longest, second.longest))


def _shift(block: _Block, k: int) -> int:
    """The k-th of all allowed shifts: multiples of the longest run first, then those between."""
    step, most = block.longest, block.stop - block.start - block.longest
    per_offset = [(most - (step + offset)) // step + 1 for offset in range(min(step, most))]
    ends = offsets_of(np.maximum(np.array(per_offset), 0))
    place = k % int(ends[-1])
    offset = int(np.searchsorted(ends, place, side="right")) - 1
    return step + offset + step * (place - int(ends[offset]))


def _separate(
    partner: NDArray[np.int64],
    prompt_keys: NDArray[np.uint64],
    completion_keys: NDArray[np.uint64],
) -> int:
    """Swaps partners until none has its own completion; returns how many had to be repeated."""
    repeated = 0
    for index in np.flatnonzero(completion_keys[partner] == completion_keys):
        if completion_keys[partner[index]] != completion_keys[index]:
            continue  # an earlier swap already mended it
        other = _swappable(int(index), partner, prompt_keys, completion_keys)
        if other is not None:
            partner[index], partner[other] = partner[other], partner[index]
        else:
            partner[index] = _any_partner(int(index), prompt_keys, completion_keys)
            repeated += 1
    return repeated


def _swappable(
    index: int,
    partner: NDArray[np.int64],
    prompt_keys: NDArray[np.uint64],
    completion_keys: NDArray[np.uint64],
) -> int | None:
    """The nearest completion further on that can exchange partners with `index`."""
    mine = partner[index]
    for near in _windows(index, len(partner)):
        theirs = partner[near]
        fits = (
            (prompt_keys[theirs] != prompt_keys[index])
            & (completion_keys[theirs] != completion_keys[index])
            & (prompt_keys[mine] != prompt_keys[near])
            & (completion_keys[mine] != completion_keys[near])
        )
        if fits.any():
            return int(near[np.argmax(fits)])
    return None


def _any_partner(
    index: int, prompt_keys: NDArray[np.uint64], completion_keys: NDArray[np.uint64]
) -> int:
    """The nearest completion further on with another prompt and another text."""
    for near in _windows(index, len(prompt_keys), everything=True):
        fits = (prompt_keys[near] != prompt_keys[index]) & (
            completion_keys[near] != completion_keys[index]
        )
        if fits.any():
            return int(near[np.argmax(fits)])
    raise BadDataError(
        "Every completion of the other prompts is the same text, so a mismatched pair (KTO's KL "
        "term) would be no mismatch. Add rows with other completions, or pass --kl-pairs 0."
    )


def _windows(index: int, total: int, *, everything: bool = False) -> list[NDArray[np.int64]]:
    last = total if everything else min(total, 1 + 8 * SEARCH_WINDOW)
    return [
        (index + np.arange(first, min(first + SEARCH_WINDOW, last))) % total
        for first in range(1, last, SEARCH_WINDOW)
    ]
