"""Chooses the KL completions of a shard, which is a key range.

A completion's k-th KL completion, its *partner* in this folder, is the one `shift_k` positions
later, wrapping around. Completions of one prompt form a run of at most `longest`. A shift between
`longest` and `size - longest` always leaves the run, and every shift is a permutation. The prompts'
hashes cut a range into blocks: while the number of shards is the same, an added row changes
partners in its own block only. A partner's text must differ from the completion's, but may equal a
sibling's. Completions whose shifted partner has their own text exchange partners. If no exchange is
possible, a completion gets any partner that fits, which is then used more than once.

The pool holds the range's completions, then those of borrowed ranges if the range has few prompts
or too few texts. If the range alone does not allow k shifts, the shift is along the whole pool.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

PROMPTS_PER_BLOCK = 64  # on average
SMALLEST_BLOCK = 64  # completions
NEAR = 256  # completions that are compared at a time in the search for an exchange
NONE = -1  # no completion fits


def choose_partners(prompts: Keys, texts: Keys, own: int, num_pairs: int) -> NDArray[np.int64]:
    """The index of partner k, or NONE, for each k and each of the first `own` completions.

    `prompts` and `texts` are keys of the pool; completions of one prompt are together.
    """
    chosen = np.full((num_pairs, own), NONE)
    for k, partners in enumerate(chosen if own else ()):
        partners[:] = _shifted(prompts, own, num_pairs, k)
        _separate(partners, prompts, texts)
        fill(partners, prompts, texts, k)
    return chosen


def runs_of(prompts: Keys) -> NDArray[np.int64]:
    """The start of each prompt's completions, and the end."""
    return np.concatenate([[0], np.flatnonzero(prompts[1:] != prompts[:-1]) + 1, [len(prompts)]])


def _shifted(prompts: Keys, own: int, num_pairs: int, k: int) -> NDArray[np.int64]:
    # Along the shard's own completions, if they allow a shift for each k. If nothing was borrowed,
    # one shift is enough.
    longest = int(np.diff(runs_of(prompts[:own])).max())
    if own - 2 * longest + 1 >= (num_pairs if len(prompts) > own else 1):
        blocks = [
            start + (np.arange(stop - start) + _shift(stop - start, most, k)) % (stop - start)
            for start, stop, most in _blocks(prompts[:own])
        ]
        return np.concatenate(blocks)
    # Along the whole pool.
    runs, every = runs_of(prompts), np.arange(len(prompts))
    start, stop = runs[int(np.diff(runs).argmax()) :][:2].tolist()
    if 2 * (stop - start) <= len(every):
        return (every[:own] + _shift(len(every), stop - start, k)) % len(every)
    # One prompt has more than half of them: its completions pair with all others.
    is_large = (every >= start) & (every < stop)
    chosen = np.full(len(every), NONE)
    large, others = every[is_large], every[~is_large]
    for mine, theirs in ((large, others), (others, large)) if len(others) else ():
        chosen[mine] = theirs[(np.arange(len(mine)) + k) % len(theirs)]
    return chosen[:own]


def _shift(size: int, longest: int, k: int) -> int:
    """The k-th of all allowed shifts: multiples of the longest run first, then those between."""
    allowed = np.arange(longest, size - longest + 1)
    return int(allowed[np.argsort(allowed % longest, kind="stable")][k % len(allowed)])


def _blocks(prompts: Keys) -> list[tuple[int, int, int]]:
    """Start, stop and longest run of each block; blocks are long enough for many shifts."""
    runs = runs_of(prompts)
    opens = np.flatnonzero(prompts[runs[:-1]] % np.uint64(PROMPTS_PER_BLOCK) == 0)
    edges = np.union1d([0], opens).astype(np.int64)
    longest_runs = np.maximum.reduceat(np.diff(runs), edges).tolist()
    blocks: list[tuple[int, int, int]] = []
    start = longest = 0
    for stop, most in zip([*runs[edges[1:]].tolist(), len(prompts)], longest_runs, strict=True):
        longest = max(longest, most)
        if stop - start >= max(SMALLEST_BLOCK, 4 * longest):
            blocks.append((start, stop, longest))
            start, longest = stop, 0
    while longest and blocks and len(prompts) - start < 4 * longest:
        start, _, before = blocks.pop()
        longest = max(longest, before)
    return [*blocks, (start, len(prompts), longest)] if longest else blocks


def _separate(partners: NDArray[np.int64], prompts: Keys, texts: Keys) -> None:
    """Exchanges each partner of equal text with the nearest later one, if both then fit."""
    own = len(partners)
    alone: set[int] = set()  # texts without any exchange left
    for index in np.flatnonzero((texts[partners] == texts[:own]) & (partners != NONE)).tolist():
        other, same = partners[index], texts[index]
        if texts[other] != same or int(same) in alone:
            continue  # an earlier exchange fixed it, or none can
        for width in (min(NEAR, own), own):
            near = (index + 1 + np.arange(width)) % own
            free = (texts[near] != same) & (texts[partners[near]] != same)
            fits = (prompts[partners[near]] != prompts[index]) & (prompts[near] != prompts[other])
            found = near[free & fits]
            if len(found):
                partners[index], partners[found[0]] = partners[found[0]], other
                break
        else:
            if not free.any():
                alone.add(int(same))
    partners[(partners != NONE) & (texts[partners] == texts[:own])] = NONE


def fill(partners: NDArray[np.int64], prompts: Keys, texts: Keys, k: int) -> None:
    """Gives completions without a partner those that fit, in turn."""
    missing, runs = np.flatnonzero(partners == NONE), runs_of(prompts)
    for text in np.unique(texts[missing]):
        rows, others = missing[texts[missing] == text], np.flatnonzero(texts != text)
        run = np.searchsorted(runs, rows, side="right") - 1
        first, last = np.searchsorted(others, runs[run]), np.searchsorted(others, runs[run + 1])
        count = len(others) - (last - first)  # of another prompt
        if len(others):
            turn = (np.arange(len(rows)) + k) % np.maximum(count, 1)
            partners[rows] = np.where(count > 0, others[(last + turn) % len(others)], NONE)
