"""Joins long-form scores, one row per completion, into one row per prompt."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...schemas.columns import Ragged, offsets_of
from ...schemas.row_keys import KeyedRows, completion_keys
from ...schemas.rows import RowBlock


def merge_same_prompts(keyed: KeyedRows, notes: Counter[str], *, prompt_side: str) -> KeyedRows:
    """Joins neighbouring rows with one prompt; their branches keep key order.

    Their prompt is the longest run of ids that all of them begin with. What a row's own prompt has
    behind that goes to the front of its completion. `prompt_side` is where long prompts were cut:
    cut each by itself, they keep what all have kept, which is a few tokens less than in list form.
    """
    keyed, firsts = _with_shared_prompts(keyed, notes, prompt_side)
    rows = keyed.rows
    stops = np.append(firsts[1:], len(rows))
    notes["rows_joined_by_prompt"] += len(rows) - len(firsts)
    for name, column in rows.carried.items():
        lowest = np.minimum.reduceat(column, firsts)
        highest = np.maximum.reduceat(column, firsts)
        notes[f"prompts_with_more_than_one_{name}"] += int((lowest != highest).sum())
    every = np.arange(len(rows.completions))
    merged = keyed.gather(firsts, every, np.append(rows.branch_offsets[firsts], len(every)))
    named = replace(merged.rows, row_id=_joined_ids(rows.row_id, firsts, stops))
    return replace(merged, rows=named).in_key_order()


@dataclass(frozen=True)
class _Shared:
    """The prompt that several rows have in common."""

    prompt: NDArray[np.int32]
    cut: int
    moved: list[NDArray[np.int32]]  # of each row, what goes to the front of its completions


def _with_shared_prompts(
    keyed: KeyedRows, notes: Counter[str], prompt_side: str
) -> tuple[KeyedRows, NDArray[np.int64]]:
    """The same rows with one prompt in each group, and where the groups begin."""
    rows, keys = keyed.rows, keyed.rows.prompt_keys.prompt
    is_first = np.append(True, keys[1:] != keys[:-1])
    shared: dict[int, _Shared] = {}
    for start, stop in _uneven_groups(rows, is_first):
        prompts = [rows.prompts[row] for row in range(start, stop)]
        found = _shared(prompts, rows.prompt_cut[start:stop].tolist(), prompt_side)
        if found:
            shared[start] = found
        else:
            is_first[start:stop] = True
            notes["prompts_whose_completions_share_no_token_of_it"] += 1
    notes["prompts_shortened_to_what_all_completions_share"] += len(shared)
    firsts = np.flatnonzero(is_first).astype(np.int64)
    return _with_prompts(keyed, shared) if shared else keyed, firsts


def _uneven_groups(rows: RowBlock, is_first: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The groups of rows of one prompt whose prompt ids differ."""
    lengths, cuts = rows.prompts.lengths, rows.prompt_cut
    near = np.flatnonzero((lengths[1:] == lengths[:-1]) & (cuts[1:] == cuts[:-1])) + 1
    mine, before = rows.prompts.take(near), rows.prompts.take(near - 1)
    differing = np.diff(offsets_of(mine.values != before.values)[mine.offsets])
    is_same = np.zeros(len(rows), dtype=np.bool_)
    is_same[near] = differing == 0
    firsts = np.flatnonzero(is_first)
    stops = np.append(firsts[1:], len(rows))
    uneven = np.add.reduceat(~is_same & ~is_first, firsts) > 0
    yield from zip(firsts[uneven].tolist(), stops[uneven].tolist(), strict=True)


def _shared(
    prompts: Sequence[NDArray[np.int32]], cuts: Sequence[int], prompt_side: str
) -> _Shared | None:
    """The shared start of all prompts, compared by token positions before truncation."""
    if prompt_side == "right":
        return _shared_cut_right(prompts, cuts)
    most = max(cuts)
    base = prompts[cuts.index(most)]
    windows = [ids[most - cut :] for ids, cut in zip(prompts, cuts, strict=True)]
    # The first token of a cut prompt may be the BOS, which is not the token at that position.
    length = _common_length(base, windows, compared_from=int(most > 0))
    if length == 0:
        return None
    return _Shared(base[:length], most, [window[length:] for window in windows])


def _shared_cut_right(prompts: Sequence[NDArray[np.int32]], cuts: Sequence[int]) -> _Shared | None:
    """Shortens right-truncated prompts to their shared start, so that no completion has a gap."""
    length = _common_length(prompts[0], prompts, compared_from=0)
    if length == 0:
        return None
    own = list(zip(prompts, cuts, strict=True))
    lost = max((cut + len(ids) - length for ids, cut in own if cut), default=0)
    moved = [ids[len(ids) if cut else length :] for ids, cut in own]
    return _Shared(prompts[0][:length], lost, moved)


def _common_length(
    base: NDArray[np.int32], others: Sequence[NDArray[np.int32]], *, compared_from: int
) -> int:
    length = len(base)
    for ids in others:
        length = min(length, len(ids))
        differs = np.flatnonzero(ids[compared_from:length] != base[compared_from:length])
        length = compared_from + int(differs[0]) if len(differs) else length
    return length


def _with_prompts(keyed: KeyedRows, shared: dict[int, _Shared]) -> KeyedRows:
    """These prompts in the rows from each start on, and what they lack in the completions."""
    rows = keyed.rows
    prompts, prompt_cut = list(rows.prompts), rows.prompt_cut.copy()
    before = [_NO_TOKENS] * len(rows.completions)
    for start, found in shared.items():
        for row, moved in enumerate(found.moved, start=start):
            prompts[row], prompt_cut[row] = found.prompt, found.cut
            for branch in range(rows.branch_offsets[row], rows.branch_offsets[row + 1]):
                before[branch] = moved
    whole = rows.with_tokens_before("completions", Ragged.of(before, np.int32))
    joined = replace(
        whole,
        turns=_as_their_turns(rows, whole, before),
        prompts=Ragged.of(prompts, np.int32),
        prompt_cut=prompt_cut,
    )
    longer = [branch for branch, moved in enumerate(before) if len(moved)]
    keys = keyed.completion_keys.copy()
    keys[longer] = completion_keys(joined.completions[branch] for branch in longer)
    return replace(keyed, rows=joined, completion_keys=keys)


def _as_their_turns(
    rows: RowBlock, longer: RowBlock, before: Sequence[NDArray[np.int32]]
) -> Ragged | None:
    """The turns of longer completions, whose first tokens count as what follows them does."""
    if rows.turns is None or longer.turns is None:
        return None
    numbers = longer.turns.values.copy()
    for branch, moved in enumerate(before):
        start = longer.turns.offsets[branch]
        numbers[start : start + len(moved)] = rows.turns[branch][:1]
    return Ragged(numbers, longer.turns.offsets)


_NO_TOKENS = np.empty(0, np.int32)


def _joined_ids(
    row_id: NDArray[np.bytes_], firsts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.bytes_]:
    digests = [
        hashlib.blake2b(row_id[start:stop].tobytes(), digest_size=16).digest()
        for start, stop in zip(firsts.tolist(), stops.tolist(), strict=True)
    ]
    return np.frombuffer(b"".join(digests), dtype="S16")
