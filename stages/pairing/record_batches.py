"""Tables of rows as Arrow record batches, by the declarations of their columns.

Each column of rows has one of the batch; those of branches and their tokens are lists in one more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.arrow_columns import arrow_of, lists_over, number_type, numpy_of, ragged_of
from ...schemas.columns import Column, ColumnTable, Ragged

Table = TypeVar("Table", bound=ColumnTable)

_BRANCHES = "branches"


def to_batch(table: ColumnTable) -> pa.RecordBatch:
    """The columns of a table, over the same memory."""
    of_rows: dict[str, pa.Array] = {}
    of_branches: dict[str, pa.Array] = {}
    offsets = table.ends()
    assert offsets is not None, "rows of a batch have branches"
    for name, each, values in _declared(table):
        if each.is_named:
            named = {f"{name}.{key}": arrow_of(one, _type_of(each)) for key, one in values.items()}
            of_rows |= named
        elif each.per == "row":
            of_rows[name] = arrow_of(values, _type_of(each))
        elif values is None:  # all batches of a file have all columns
            of_branches[name] = pa.nulls(int(offsets[-1]), _type_of(each))
        elif each.per != "offsets":
            of_branches[name] = arrow_of(values, _type_of(each))
    nested = pa.StructArray.from_arrays(list(of_branches.values()), list(of_branches))
    of_rows[_BRANCHES] = lists_over(offsets, nested, pa.list_(nested.type))
    return pa.RecordBatch.from_arrays(list(of_rows.values()), names=list(of_rows))


def _declared(table: ColumnTable, above: str = "") -> Iterator[tuple[str, Column, Any]]:
    """All columns and their values, those of tables within by their paths."""
    for name, each in table.columns().items():
        path, value = f"{above}{name}", getattr(table, name)
        if each.within:
            assert type(value) is each.within, f"{path} has columns that are not declared"
            yield from _declared(value, f"{path}.")
        else:
            yield path, each, value


@cache
def _type_of(each: Column) -> pa.DataType:
    number = number_type(each.kind)
    return pa.list_(number) if each.is_list else number


def from_batch(kind: type[Table], batch: pa.RecordBatch) -> Table:
    """The table of a batch or of several that were joined, over their memory."""
    *of_rows, lists = batch.columns
    arrays = dict(zip(batch.schema.names, of_rows, strict=False))
    names = [each.name for each in lists.type.value_type]
    arrays |= zip(names, lists.values.flatten(), strict=True)
    return _filled(kind, "", arrays, numpy_of(lists.offsets).astype(np.int64))


def _filled(
    kind: type[Table], above: str, arrays: Mapping[str, pa.Array], offsets: NDArray[np.int64]
) -> Table:
    values: dict[str, Any] = {}
    for name, each in kind.columns().items():
        path = f"{above}{name}"
        if each.within:
            values[name] = _filled(each.within, f"{path}.", arrays, offsets)
        elif each.per == "offsets":
            values[name] = offsets
        elif each.is_named:
            found = [key for key in arrays if key.startswith(f"{path}.")]
            values[name] = {key[len(path) + 1 :]: numpy_of(arrays[key]) for key in found}
        elif each.per == "token":
            values[name] = _of_tokens(each, arrays[path], arrays[f"{above}{each.of}"])
        else:
            values[name] = (ragged_of if each.is_list else numpy_of)(arrays[path])
    return kind(**values)


def _of_tokens(each: Column, lists: pa.Array, tokens: pa.Array) -> Ragged | None:
    """A column per token; where batches without it were joined to others, its missing value."""
    if lists.null_count == len(lists):
        return None
    found, count = ragged_of(lists), np.arange(len(lists))
    if not lists.null_count:
        return found
    whole = each.along(ragged_of(tokens))
    is_there = found.lengths == whole.lengths
    return Ragged.concat([found, whole]).take(np.where(is_there, count, count + len(lists)))
