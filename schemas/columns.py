"""Tables of rows, column by column, which are regrouped by the declarations of their columns.

A table is a frozen dataclass whose fields are declared by `column`. Its values are arrays, lists of
tokens, tables of their own, mappings of such, or None where a column is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

Per = Literal["row", "branch", "token", "offsets"]  # offsets: of the branches of each row


@dataclass(frozen=True)
class Column:
    """The declaration of a column: what a value belongs to, its type, and its name in a shard.

    One per token has a list for each list of tokens, and may be None: it has its missing value
    everywhere, or is not kept.
    """

    per: Per
    kind: str = ""  # numpy's name for the type of its numbers
    missing: float | None = None  # None: the caller that adds a branch gives its value
    of: str = ""  # of a column per token: that of the tokens
    is_list: bool = False
    is_named: bool = False  # a mapping of columns, by names that the data bring
    within: type[ColumnTable] | None = None  # a table of its own
    stored: str = ""  # nothing if it is written in a way of its own
    counted: str = ""  # the name in a shard of the lengths of its lists

    def __post_init__(self) -> None:
        is_whole = self.of and self.is_list
        assert is_whole if self.per == "token" else not self.of, "lists of values of tokens"
        can_miss = self.per in {"branch", "token"} and self.kind
        assert self.missing is None or can_miss, "only branches are added"

    def filled(self, count: int) -> NDArray[Any]:
        """The column of `count` added values without data."""
        assert self.missing is not None, "an added branch needs a value in this column"
        return np.full(count, self.missing, self.kind)

    def along(self, tokens: Ragged) -> Ragged:
        """The column per token of tokens without data."""
        return Ragged(self.filled(len(tokens.values)), tokens.offsets)


def column(per: Per, kind: str = "", **declared: Any) -> Any:
    """The field of a column; one per token is None unless it is given, if it can be missing."""
    made = Column(per, kind, **declared)
    if per == "token" and made.missing is not None:
        return field(default=None, kw_only=True, metadata={"column": made})
    return field(metadata={"column": made})


class ColumnTable:
    """A table that can be regrouped."""

    @classmethod
    @cache
    def columns(cls) -> Mapping[str, Column]:
        """Its columns, by name."""
        return {each.name: each.metadata["column"] for each in fields(cast("Any", cls))}

    def __post_init__(self) -> None:
        """Refuses a column per token that was left behind where its tokens were replaced."""
        for name, each in self.columns().items():
            if each.per == "token" and (values := getattr(self, name)) is not None:
                tokens = attrgetter(each.of)(self)
                assert np.array_equal(values.offsets, tokens.offsets), f"{name} of other tokens"

    def whole(self, name: str) -> Ragged:
        """A column per token, with its missing value where it is None."""
        each, values = self.columns()[name], getattr(self, name)
        return each.along(attrgetter(each.of)(self)) if values is None else values

    def told(self, name: str) -> Any:
        """A column; None if it is one per token and has its missing value everywhere."""
        each, values = self.columns()[name], getattr(self, name)
        is_untold = (
            each.per == "token"
            and each.missing is not None
            and values is not None
            and (values.values == each.missing).all()
        )
        return None if is_untold else values

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
        at = {"row": rows, "branch": branches, "token": branches}
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

    def between(self, start: int, stop: int) -> Self:
        """Rows `start` to `stop`, without copying values."""
        ends = self.ends()
        branches = slice(0, 0) if ends is None else slice(*ends[[start, stop]].tolist())
        return self._cut_out(slice(start, stop), branches)

    def _cut_out(self, rows: slice, branches: slice) -> Self:
        kept: dict[str, Any] = {}
        for name, each in self.columns().items():
            value = getattr(self, name)
            if each.per == "offsets":
                kept[name] = value[rows.start : rows.stop + 1] - branches.start
            elif isinstance(value, ColumnTable):
                kept[name] = value._cut_out(rows, branches)
            else:
                kept[name] = _sliced(value, rows if each.per == "row" else branches)
        return type(self)(**kept)

    def take(self, rows: NDArray[np.int64]) -> Self:
        """The rows at `rows`, in that order, with all of their branches."""
        ends = self.ends()
        if ends is None:
            return self.gather(rows, _NOTHING, _NOTHING)
        counts = np.diff(ends)[rows]
        return self.gather(rows, joined_ranges(ends[rows], counts), offsets_of(counts))

    def brought_along(self) -> dict[str, Any]:
        """What its branches bring into other rows: all but what has a missing value for that."""
        found: dict[str, Any] = {}
        for name, each in self.columns().items():
            value = getattr(self, name)
            is_kept = each.per == "token" and value is not None
            if is_kept or (each.per == "branch" and each.missing is None):
                found[name] = value
        return found

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
                more = added[name] if name in added else each.filled(count)
                changed[name] = _taken(_joined([changed[name], more], each.per), order)
            elif each.per == "token" and (changed[name] is not None or name in added):
                more = added[name] if name in added else each.along(added[each.of])
                changed[name] = Ragged.concat([self.whole(name), more]).take(order)
            elif each.per == "offsets":
                changed[name] = offsets
        others = added.keys() - self.columns().keys()
        assert not others, f"no columns of branches: {others}"
        return type(self)(**changed)

    def with_tokens_before(self, name: str, more: Ragged) -> Self:
        """The same rows; each list of `more` goes to the front of one in the column `name`.

        What belongs to these tokens gets its missing value there.
        """
        changed = {name: more.followed_by(getattr(self, name))}
        for other, values in self._belonging_to(name):
            changed[other] = self.columns()[other].along(more).followed_by(values)
        longer: Self = replace(cast("Any", self), **changed)
        return longer

    def with_heads(self, name: str, limits: NDArray[np.int64]) -> Self:
        """The same rows; list i of the column `name` is cut to at most `limits[i]` leading values.

        What belongs to these tokens is cut with them.
        """
        changed = {name: getattr(self, name).head(limits)}
        for other, values in self._belonging_to(name):
            changed[other] = values.head(limits)
        shorter: Self = replace(cast("Any", self), **changed)
        return shorter

    def _belonging_to(self, name: str) -> Iterator[tuple[str, Ragged]]:
        """The columns per token of the tokens in the column `name`, but those that are None."""
        for other, each in self.columns().items():
            if each.of == name and (values := getattr(self, other)) is not None:
                yield other, values

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of several tables with the same columns, in order."""
        joined: dict[str, Any] = {}
        for name, each in cls.columns().items():
            values = [getattr(part, name) for part in parts]
            if each.per == "token" and not all(value is None for value in values):
                values = [part.whole(name) for part in parts]
            joined[name] = _joined(values, each.per)
        return cls(**joined)


_NOTHING = np.empty(0, np.int64)


def _taken(value: Any, indices: NDArray[np.int64]) -> Any:
    if isinstance(value, Mapping):
        return {name: _taken(each, indices) for name, each in value.items()}
    if isinstance(value, Ragged):
        return value.take(indices)
    return None if value is None else value[indices]


def _sliced(value: Any, part: slice) -> Any:
    if isinstance(value, Mapping):
        return {name: _sliced(each, part) for name, each in value.items()}
    if isinstance(value, Ragged):
        return value.slice(part.start, part.stop)
    return None if value is None else value[part]


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


VALUES_AT_ONCE = 1 << 18


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

    def followed_by(self, other: Ragged) -> Ragged:
        """Each list with the one of `other` behind it."""
        count = len(self)
        order = np.arange(2 * count).reshape(2, count).T.ravel()
        both = Ragged.concat([self, other]).take(order)
        return Ragged(both.values, both.offsets[::2])

    def take(self, indices: NDArray[np.int64]) -> Ragged:
        """The lists at `indices`, in that order."""
        lengths = self.lengths[indices]
        offsets, starts = offsets_of(lengths), self.offsets[indices]
        values = np.empty(offsets[-1], self.values.dtype)
        # An index of eight bytes for each value is made for some of them at a time.
        bounds = np.searchsorted(offsets, np.arange(0, offsets[-1], VALUES_AT_ONCE)).tolist()
        for first, stop in pairwise([*bounds, len(lengths)]):
            kept = joined_ranges(starts[first:stop], lengths[first:stop])
            values[offsets[first] : offsets[stop]] = self.values.take(kept)
        return Ragged(values, offsets)

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
