"""Exports a cache as one flat Parquet file with the column names of TRL's trainers.

Each `..._ids` column stands beside the text it decodes to: text can be tokenized differently
elsewhere, ids cannot. The second and later mismatches of a completion get a number after their
name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...schemas.errors import CorruptionError, UsageError
from ...schemas.rows import Ragged, Role, RowBlock, ScoredBlock
from ..storage import fs
from ..storage.cache_folder import CacheFolder
from ..storage.manifest_file import load_manifest
from ..storage.shard_columns import read_block, row_ids
from ..storage.shards import iter_row_groups


def export_trl(
    folder: CacheFolder, target: Path, *, decode: Decode, overwrite: bool = False
) -> int:
    """Writes `target` in one step and returns how many rows it holds."""
    _require_free(target, overwrite=overwrite)
    tables = _flat_tables(folder, decode)
    with fs.new_file(target, replaces=overwrite) as sink:
        return _write(sink, tables)


def _require_free(target: Path, *, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a folder. Make it, or choose another --output.")
    if target.is_dir():
        raise UsageError(f"{target} is a folder. Choose another --output.")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists. Pass --overwrite, or choose another --output.")


def _flat_tables(folder: CacheFolder, decode: Decode) -> Iterator[pa.Table]:
    manifest = load_manifest(folder)
    if not manifest.rows:
        raise UsageError(f"{folder.root} holds no rows, so there is nothing to export.")
    for shard in manifest.shards:
        path = folder.data / shard.file
        for group in iter_row_groups(path):
            yield flat_table(read_block(group, source=str(path)), decode, source=str(path))


def _write(sink: BinaryIO, tables: Iterator[pa.Table]) -> int:
    num_rows = 0
    with ExitStack() as stack:
        writer = None
        for table in tables:
            if writer is None:
                opened = pq.ParquetWriter(sink, table.schema, compression="zstd")
                writer = stack.enter_context(opened)
            if not table.schema.equals(writer.schema):
                raise CorruptionError(
                    "The shards of this cache hold different kinds of rows. Make the cache again."
                )
            writer.write_table(table)
            num_rows += len(table)
    return num_rows


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
    branches: BranchColumns
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


Kind: TypeAlias = Literal["paired", "unpaired", "scored"]


@dataclass(frozen=True)
class BranchColumns:
    """Places in the block's branch columns."""

    kind: Kind
    own: NDArray[np.int64]  # (own branches,) in row order
    own_offsets: NDArray[np.int64]  # (rows + 1,) into `own`
    mismatched: NDArray[np.int64]  # (k, own branches): the k-th mismatch of each


def branches_of(rows: RowBlock, *, source: str) -> BranchColumns:
    """Own branches lead a row; after them come all first mismatches, all second ones, ..."""
    is_own = rows.roles != Role.MISMATCHED
    own_offsets = np.concatenate(([0], np.cumsum(is_own)))[rows.branch_offsets]
    num_own, num_all = np.diff(own_offsets), np.diff(rows.branch_offsets)
    levels = int(num_all[0] // num_own[0]) - 1 if num_own.all() else -1
    _require(levels >= 0 and bool((num_all == num_own * (1 + levels)).all()), source)
    own = np.flatnonzero(is_own)
    step = num_own[rows.row_of_branch[own]]
    mismatched = own + np.arange(1, levels + 1)[:, None] * step
    _require(not is_own[mismatched].any(), source)
    return BranchColumns(_kind(rows.roles[own], num_own, source), own, own_offsets, mismatched)


def _kind(roles: NDArray[Any], num_own: NDArray[Any], source: str) -> Kind:
    if (roles == Role.CANDIDATE).all():
        return "scored"
    if np.isin(roles, (Role.DESIRABLE, Role.UNDESIRABLE)).all():
        return "unpaired"
    _require(bool((num_own == 2).all()), source)
    pairs = np.sort(roles.reshape(-1, 2), axis=1)
    _require(bool((pairs == (Role.CHOSEN, Role.REJECTED)).all()), source)
    return "paired"


def _require(good: bool, source: str) -> None:
    if not good:
        raise CorruptionError(
            f"{source} holds rows whose branches fit no kind of data. "
            "Restore it from a copy, or make the cache again."
        )
