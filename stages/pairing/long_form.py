"""Joins long-form scores, one row per completion, into one row per prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schemas.columns import Ragged, is_valid, offsets_of, packed
from ...schemas.row_table import Rows, digest_of, keys_of


def merge_same_prompts(rows: Rows, notes: Counter[str], *, prompt_side: str) -> Rows:
    """Joins neighbouring rows with one prompt; their completions keep key order.

    The joint prompt is the longest common prefix of their ids. The rest of a row's prompt moves to
    the front of its completion. `prompt_side` is the side where long prompts were cut. Each was cut
    by itself, so the common part may be a few tokens shorter than in list form.
    """
    rows, firsts = _with_shared_prompts(rows, notes, prompt_side)
    notes["rows_joined_by_prompt"] += len(rows) - len(firsts)
    for name, column in rows.carried.items():
        lowest = np.minimum.reduceat(column, firsts)
        highest = np.maximum.reduceat(column, firsts)
        notes[f"prompts_with_more_than_one_{name}"] += int((lowest != highest).sum())
    every, ids = np.arange(len(rows.completions)), rows.ids()
    offsets = np.append(rows.completion_offsets[firsts], len(every))
    bounds = zip(firsts.tolist(), [*firsts[1:].tolist(), len(rows)], strict=True)
    joined_ids = [
        digest_of(bytes.fromhex("".join(ids[start:stop]))).hex() for start, stop in bounds
    ]
    return rows.gather(firsts, every, offsets).with_columns(row_id=joined_ids).in_key_order()


@dataclass(frozen=True)
class _Shared:
    """The common prompt of several rows."""

    prompt: NDArray[np.int32]
    cut: int
    moved: list[NDArray[np.int32]]  # ids that move to the front of each row's completions


def _with_shared_prompts(
    rows: Rows, notes: Counter[str], prompt_side: str
) -> tuple[Rows, NDArray[np.int64]]:
    """The rows with one prompt per group, and the starts of the groups."""
    is_first = np.append(True, rows.prompt_key[1:] != rows.prompt_key[:-1])
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
    return _with_prompts(rows, shared) if shared else rows, firsts


def _uneven_groups(rows: Rows, is_first: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The groups of rows with one prompt but unequal prompt ids."""
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
    """The common prefix of all prompts, compared at their positions before truncation."""
    is_left = prompt_side == "left"
    cut = max(cuts) if is_left else 0
    base = prompts[cuts.index(cut)] if is_left else prompts[0]
    windows = [ids[cut - own :] if is_left else ids for ids, own in zip(prompts, cuts, strict=True)]
    # The first token of a cut prompt may be a BOS that replaced the token at that position.
    length, start = len(base), int(cut > 0)
    for ids in windows:
        length = min(length, len(ids))
        differs = np.flatnonzero(ids[start:length] != base[start:length])
        length = start + int(differs[0]) if len(differs) else length
    if length == 0:
        return None
    moved = [ids[length:] for ids in windows]
    if not is_left:  # tokens are missing after a cut prompt: no completion starts before them
        lost = zip(prompts, cuts, strict=True)
        cut = max((own + len(ids) - length for ids, own in lost if own), default=0)
        moved = [more[:0] if own else more for more, own in zip(moved, cuts, strict=True)]
    return _Shared(base[:length], cut, moved)


def _with_prompts(rows: Rows, shared: dict[int, _Shared]) -> Rows:
    """The rows with the common prompts; the removed ids move into the completions."""
    prompts, prompt_cut = list(rows.prompts), rows.prompt_cut.copy()
    completions, keys = list(rows.completions), rows.completion_key.copy()
    has_turns = is_valid(rows.of_completions.column("completion_turns"))
    turns: list[Any] = [()] * len(completions)
    if rows.learned is not None:
        for completion in np.flatnonzero(has_turns).tolist():
            turns[completion] = rows.learned[completion]
    for start, found in shared.items():
        for row, moved in enumerate(found.moved, start=start):
            prompts[row], prompt_cut[row] = found.prompt, found.cut
            for completion in (
                range(*rows.completion_offsets[row : row + 2].tolist()) if len(moved) else ()
            ):
                completions[completion] = np.append(moved, completions[completion])
                (keys[completion],) = keys_of([digest_of(completions[completion].tobytes())])
                if has_turns[completion]:  # moved tokens are learned if the next token is
                    turns[completion] = [*[turns[completion][0]] * len(moved), *turns[completion]]
    return rows.with_columns(
        prompt_ids=Ragged.of(prompts, np.int32),
        prompt_cut=prompt_cut,
        completion_ids=Ragged.of(completions, np.int32),
        completion_turns=packed(Ragged.of(turns, np.int16), has_turns),
        completion_key=keys,
    )
