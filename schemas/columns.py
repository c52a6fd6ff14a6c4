"""Tables of rows, column by column, which are regrouped by the declarations of their columns.

A table is a frozen dataclass whose fields are declared by `column`. Its values are arrays, lists of
tokens, tables of their own, mappings of such, or None where a column is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

Per = Literal["row", "branch", "offsets"]  # offsets: of the branches of each row


@dataclass(frozen=True)
class Column:
    """The declaration of a column: what a value belongs to, and its value in added branches."""

    per: Per
    missing: float | None = None  # None: the caller that adds a branch gives its value

    def filled(self, count: int, like: Any) -> NDArray[Any]:
        """The column of `count` added branches without data."""
        assert self.missing is not None, "an added branch needs a value in this column"
        assert isinstance(like, np.ndarray), "only of numbers something can be missing"
        return np.full(count, self.missing, like.dtype)


def column(per: Per, *, missing: float | None = None) -> Any:
    """The field of a column."""
    assert missing is None or per == "branch", "only branches are added"
    return field(metadata={"column": Column(per, missing)})


class ColumnTable:
    """A table that can be regrouped."""

    @classmethod
    def columns(cls) -> Mapping[str, Column]:
        """Its columns, by name."""
        return {each.name: each.metadata["column"] for each in fields(cast("Any", cls))}

    def ends(self) -> NDArray[np.int64] | None:
        """Its column of offsets, or that of a table within; None if its rows have no branches."""
        own = [
            getattr(self, name) for name, each in self.columns().items() if each.per == "offsets"
        ]
        every = [getattr(self, name) for name in self.columns()]
        within = [value.ends() for value in every if isinstance(value, ColumnTable)]
        return next((found for found in (*own, *within) if found is not None), None)

    def gather(
        self, rows: NDArray[np.int64], branches: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> Self:
        """The rows at `rows`; `offsets` divide the branches at `branches` among them."""
        at = {"row": rows, "branch": branches}
        regrouped: dict[str, Any] = {}
        for name, each in self.columns().items():
            value = getattr(self, name)
            if each.per == "offsets":
                regrouped[name] = offsets
            elif isinstance(value, ColumnTable):
                regrouped[name] = value.gather(rows, branches, offsets)
            else:
                regrouped[name] = _taken(value, at[each.per])
        return type(self)(**regrouped)

    def take(self, rows: NDArray[np.int64]) -> Self:
        """The rows at `rows`, in that order, with all of their branches."""
        ends = self.ends()
        if ends is None:
            return self.gather(rows, _NOTHING, _NOTHING)
        counts = np.diff(ends)[rows]
        return self.gather(rows, joined_ranges(ends[rows], counts), offsets_of(counts))

    def with_branches(
        self, order: NDArray[np.int64], offsets: NDArray[np.int64], **added: Any
    ) -> Self:
        """The same rows with more branches; in `order` the added ones follow the table's own.

        A column that is not in `added` gets its declared missing value.
        """
        (count,) = {len(values) for values in added.values()}
        changed: dict[str, Any] = {name: getattr(self, name) for name in self.columns()}
        within = [
            one
            for one in changed.values()
            if isinstance(one, ColumnTable) and one.ends() is not None
        ]
        assert not within, "branches are added to the table that has their offsets"
        for name, each in self.columns().items():
            if each.per == "branch":
                own = changed[name]
                more = added.pop(name) if name in added else each.filled(count, own)
                changed[name] = _taken(_joined([own, more], each.per), order)
            elif each.per == "offsets":
                changed[name] = offsets
        assert not added, f"no columns of branches: {added.keys()}"
        return type(self)(**changed)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of several tables with the same columns, in order."""
        return cls(
            **{
                name: _joined([getattr(part, name) for part in parts], each.per)
                for name, each in cls.columns().items()
            }
        )


_NOTHING = np.empty(0, np.int64)


def _taken(value: Any, indices: NDArray[np.int64]) -> Any:
    if isinstance(value, Mapping):
        return {name: _taken(each, indices) for name, each in value.items()}
    if isinstance(value, Ragged):
        return value.take(indices)
    return None if value is None else value[indices]


def _joined(values: Sequence[Any], per: Per) -> Any:
    first = values[0]
    if isinstance(first, ColumnTable | Ragged):
        return type(first).concat(values)
    if isinstance(first, Mapping):
        return {name: _joined([value[name] for value in values], per) for name in first}
    if first is None:
        return None
    if per == "offsets":
        return offsets_of(np.concatenate([np.diff(value) for value in values]))
    return np.concatenate(values)


@dataclass(frozen=True)
class Ragged:
    """`values[offsets[i]:offsets[i + 1]]` is list i."""

    values: NDArray[Any]  # (total,)
    offsets: NDArray[np.int64]  # (lists + 1,), offsets[0] == 0

    @staticmethod
    def of(lists: Sequence[Any], dtype: Any) -> Ragged:
        """Packs Python lists or arrays."""
        lengths = np.fromiter((len(item) for item in lists), dtype=np.int64, count=len(lists))
        filled = [np.asarray(item, dtype=dtype) for item in lists if len(item)]
        values = np.concatenate(filled) if filled else np.empty(0, dtype=dtype)
        return Ragged(values, offsets_of(lengths))

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """The lists of several, in order."""
        lengths = np.concatenate([part.lengths for part in parts])
        return Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each list."""
        return np.diff(self.offsets)

    def take(self, indices: NDArray[np.int64]) -> Ragged:
        """The lists at `indices`, in that order."""
        lengths = self.lengths[indices]
        kept = joined_ranges(self.offsets[indices], lengths)
        return Ragged(self.values[kept], offsets_of(lengths))

    def slice(self, start: int, stop: int) -> Ragged:
        """Lists `start` to `stop`, without copying values."""
        first, last = self.offsets[start], self.offsets[stop]
        return Ragged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def head(self, limits: NDArray[np.int64]) -> Ragged:
        """Each list cut to at most `limits[i]` leading values."""
        lengths = np.minimum(self.lengths, limits)
        if (lengths == self.lengths).all():
            return self
        kept = joined_ranges(self.offsets[:-1], lengths)
        return Ragged(self.values[kept], offsets_of(lengths))


def offsets_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Running totals with a leading zero."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def joined_ranges(starts: NDArray[np.int64], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """The ranges `starts[i]` to `starts[i] + lengths[i]`, concatenated."""
    offsets = offsets_of(lengths)
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1], dtype=np.int64)
