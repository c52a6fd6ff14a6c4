"""From rows with branches to flat columns, one set of names per kind of data.

Each `..._ids` column stands beside the text it decodes to: text can be tokenized differently
elsewhere, ids cannot. The second and later mismatches of a completion get a number after their
name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from ...schemas.rows import Role
from ..storage.shard_columns import row_ids
from .branches import Branches, branches_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...schemas.rows import Ragged, ScoredBlock


class Decode(Protocol):
    """Token ids to text."""

    def __call__(self, lists: Sequence[Sequence[int]], *, continues: bool) -> list[str]:
        """`continues`: the ids follow a prompt, so a blank they begin with is meant."""
        ...


def flat_table(block: ScoredBlock, decode: Decode, *, source: str) -> pa.Table:
    """The rows of a block as another trainer wants them; unpaired rows have one branch each."""
    branches = branches_of(block.rows, source=source)
    make = {"paired": _paired, "unpaired": _unpaired, "scored": _scored}[branches.kind]
    return pa.table(make(_Flat(block, branches, decode)))


def _paired(flat: _Flat) -> dict[str, pa.Array]:
    roles = flat.block.rows.roles[flat.branches.own]
    columns = flat.of_rows(np.arange(len(flat.block.rows)))
    for name, role in (("chosen", Role.CHOSEN), ("rejected", Role.REJECTED)):
        places = np.flatnonzero(roles == role)
        columns |= flat.completions(name, f"{name}_ids", flat.branches.own[places])
        columns[f"ref_{name}_logps"] = flat.logps(flat.branches.own[places])
        for suffix, mismatched in flat.levels():
            partner = f"KL_{name}"
            columns |= flat.completions(
                partner + suffix, f"{partner}_ids{suffix}", mismatched[places]
            )
            columns[f"ref_{name}_KL_logps{suffix}"] = flat.logps(mismatched[places])
    return columns


def _unpaired(flat: _Flat) -> dict[str, pa.Array]:
    own = flat.branches.own
    columns = flat.of_rows(flat.block.rows.row_of_branch[own])
    columns |= flat.completions("completion", "completion_ids", own)
    columns["label"] = pa.array(flat.block.rows.roles[own] == Role.DESIRABLE)
    columns["ref_logps"] = flat.logps(own)
    for suffix, mismatched in flat.levels():
        names = f"KL_completion{suffix}", f"KL_completion_ids{suffix}"
        columns |= flat.completions(*names, mismatched)
        columns[f"ref_KL_logps{suffix}"] = flat.logps(mismatched)
    return columns


def _scored(flat: _Flat) -> dict[str, pa.Array]:
    own = flat.branches.own
    columns = flat.of_rows(np.arange(len(flat.block.rows)))
    lists = flat.completions("completions", "completion_ids", own)
    lists["scores"] = pa.array(flat.block.rows.scores[own], from_pandas=True)
    lists["ref_logps"] = flat.logps(own)
    for suffix, mismatched in flat.levels():
        names = f"KL_completions{suffix}", f"KL_completion_ids{suffix}"
        lists |= flat.completions(*names, mismatched)
        lists[f"ref_KL_logps{suffix}"] = flat.logps(mismatched)
    return columns | {name: flat.per_row(column) for name, column in lists.items()}


@dataclass(frozen=True)
class _Flat:
    """A block, and how its columns are picked apart."""

    block: ScoredBlock
    branches: Branches
    decode: Decode

    def of_rows(self, places: NDArray[np.int64]) -> dict[str, pa.Array]:
        """The columns about whole rows."""
        rows = self.block.rows
        prompts = rows.prompts.take(places)
        carried = {name: pa.array(values[places]) for name, values in rows.carried.items()}
        ids = {"row_id": row_ids(rows).take(pa.array(places))}
        texts = pa.array(self.decode(_plain(prompts), continues=False), pa.string())
        cut = pa.array(rows.prompt_cut[places])
        return (
            ids | {"prompt": texts, "prompt_ids": _list_array(prompts), "prompt_cut": cut} | carried
        )

    def completions(
        self, text_name: str, ids_name: str, places: NDArray[np.int64]
    ) -> dict[str, pa.Array]:
        """The completions of some branches, as text and as ids."""
        picked = self.block.rows.completions.take(places)
        texts = pa.array(self.decode(_plain(picked), continues=True), pa.string())
        cut = pa.array(self.block.rows.cut[places])  # tokens lost: such a text ended without EOS
        return {text_name: texts, ids_name: _list_array(picked), f"{text_name}_cut": cut}

    def logps(self, places: NDArray[np.int64]) -> pa.Array:
        """The reference log-probs of some branches."""
        return pa.array(self.block.logps[places], pa.float64())

    def levels(self) -> list[tuple[str, NDArray[np.int64]]]:
        """The mismatches of all own branches, level by level, with the ending of their names."""
        named = enumerate(self.branches.mismatched, start=1)
        return [("" if level == 1 else f"_{level}", places) for level, places in named]

    def per_row(self, column: pa.Array) -> pa.Array:
        """One list per row of what is one value per own branch."""
        offsets = pa.array(self.branches.own_offsets.astype(np.int32))
        return pa.ListArray.from_arrays(offsets, column)


def _plain(lists: Ragged) -> list[list[int]]:
    return [ids.tolist() for ids in lists]


def _list_array(lists: Ragged) -> pa.Array:
    offsets = pa.array(lists.offsets.astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(lists.values, pa.int32()))
