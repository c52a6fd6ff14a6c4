"""Stored rows, tokens and all, as a method reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...schemas.rows import Ragged, Role, RowBlock, ScoredBlock, offsets_of
from .ranges import joined_ranges
from .selection import select

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .reading import Reading
    from .selection import Selection


def as_read(
    block: ScoredBlock, rows: NDArray[np.int64], *, reading: Reading, source: str
) -> ScoredBlock:
    """Of the rows that a method reads of a row group those at `rows`, laid out as stored ones are.

    Only their own branches are in it, and the mismatches of these where any are read.
    """
    stored = block.rows
    picked = select(
        stored.roles, stored.scores, stored.branch_offsets, reading=reading, source=source
    )
    counts = np.diff(picked.branch_offsets)[rows]
    own = joined_ranges(picked.branch_offsets[rows], counts)
    levels = picked.mismatched.shape[1] if reading.mismatched else 0
    places = np.concatenate([picked.own[own], picked.mismatched[own, :levels].T.ravel()])
    row_of = np.tile(np.repeat(np.arange(len(rows)), counts), 1 + levels)
    order = np.argsort(row_of, kind="stable")
    others = np.full(levels * len(own), Role.MISMATCHED, dtype=np.int8)
    scores = np.concatenate([picked.scores[own], stored.scores[places[len(own) :]]])
    branches, from_rows = places[order], picked.rows[rows]
    kept = block.token_logps
    return ScoredBlock(
        RowBlock(
            row_id=stored.row_id[from_rows],
            copy=stored.copy[from_rows],
            file=stored.file[from_rows],
            row=stored.row[from_rows],
            prompt_keys=stored.prompt_keys.take(from_rows),
            prompts=_prompts(stored, picked, rows, reading),
            prompt_cut=stored.prompt_cut[from_rows],
            branch_offsets=offsets_of(counts * (1 + levels)),
            completions=stored.completions.take(branches),
            roles=np.concatenate([picked.roles[own], others])[order],
            scores=scores[order],
            cut=stored.cut[branches],
            carried={name: column[from_rows] for name, column in stored.carried.items()},
        ),
        block.logps[branches],
        None if kept is None else kept.take(branches),
    )


def context_lengths(picked: Selection, reading: Reading) -> NDArray[np.int64]:
    """Tokens that are added to the prompt of each row, (rows,)."""
    lengths = np.zeros(len(picked.rows), dtype=np.int64)
    for role, tokens in reading.context.items():
        lengths[picked.roles[picked.branch_offsets[:-1]] == role] = len(tokens)
    return lengths


def _prompts(
    stored: RowBlock, picked: Selection, rows: NDArray[np.int64], reading: Reading
) -> Ragged:
    prompts = stored.prompts.take(picked.rows[rows])
    if not reading.context:
        return prompts
    roles = picked.roles[picked.branch_offsets[:-1][rows]].tolist()
    more = [np.array(reading.context[Role(role)], dtype=np.int32) for role in roles]
    return Ragged.of(
        [np.append(ids, end) for ids, end in zip(prompts, more, strict=True)], np.int32
    )
