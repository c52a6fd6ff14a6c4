"""Sorted rows: pages of rows in ring order, and what is read of them by row or completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schemas.row_keys import KeyedRows
from ..storage.cache.shards import group_bounds
from .page_columns import from_page, to_page
from .pages import PAGE, PageWriter, read_pages

# An entry of the directory of sorted rows.
ROWS_PAGE = np.dtype(
    [
        *((name, PAGE[name]) for name in PAGE.names or ()),
        ("file", "<u4"),  # which of the files the page is in
        ("row", "<i8"),  # one past the page's last row
        ("completion", "<i8"),  # one past its last completion
        ("prompt_tokens", "<i8"),
        ("completion_tokens", "<i8"),
    ]
)


def write_rows(pages: PageWriter, keyed: KeyedRows) -> None:
    """Writes rows in pages, whose entries count the rows and completions of each page alone."""
    bounds, rows = group_bounds(keyed.rows), keyed.rows
    edges = np.array([0, *(stop for _, stop in bounds)])
    branches = rows.branch_offsets[edges]
    entries = np.zeros(len(bounds), dtype=ROWS_PAGE)
    entries["row"] = np.diff(edges)
    entries["completion"] = np.diff(branches)
    entries["prompt_tokens"] = np.diff(rows.prompts.offsets[edges])
    entries["completion_tokens"] = np.diff(rows.completions.offsets[branches])
    every = to_page(keyed)
    for number, (start, stop) in enumerate(bounds):
        pages.append(every.slice(start, stop - start), entries[number : number + 1])


def joined_directory(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The directories of files as one: rows and completions are counted through all of them."""
    directory = np.concatenate([np.empty(0, dtype=ROWS_PAGE), *parts])
    directory["file"] = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    for name in ("row", "completion"):
        directory[name] = np.cumsum(directory[name])
    return directory


@dataclass(frozen=True)
class SortedRows:
    """Rows in ring order, in files one after another."""

    files: tuple[Path, ...]
    directory: NDArray[Any]  # (pages,) ROWS_PAGE
    held: int = 0  # pages kept in memory

    def __len__(self) -> int:
        return first_of(self.directory["row"], len(self.directory))

    @property
    def num_completions(self) -> int:
        """Completions of all rows together."""
        return first_of(self.directory["completion"], len(self.directory))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return int(self.directory["prompt_tokens"].sum())

    @property
    def completion_tokens(self) -> int:
        """Tokens of all completions together."""
        return int(self.directory["completion_tokens"].sum())

    def read(self, start: int, stop: int) -> KeyedRows:
        """Rows `start` to `stop`."""
        wanted = pages_between(self.directory["row"], start, stop)
        parts = [self.page(number).between(part.start, part.stop) for number, part in wanted]
        return KeyedRows.concat(parts)

    def first_completion(self, row: int) -> int:
        """The number of the first completion of a row."""
        ((number, part),) = pages_between(self.directory["row"], row, row + 1)
        branches = self.page(number).rows.branch_offsets
        return first_of(self.directory["completion"], number) + int(branches[part.start])

    def at(self, completions: NDArray[np.int64]) -> KeyedRows:
        """A row for each of these completions, in that order: with it alone, and no prompt."""
        ends = self.directory["completion"]
        page_of = np.searchsorted(ends, completions, side="right")
        order = np.argsort(page_of, kind="stable")
        parts: list[KeyedRows] = []
        for number in np.unique(page_of).tolist() or [0]:
            wanted = completions[order][page_of[order] == number] - first_of(ends, number)
            parts.append(_rows_of_branches(self.page(number), wanted))
        return KeyedRows.concat(parts).take(np.argsort(order))

    @cached_property
    def page(self) -> Callable[[int], KeyedRows]:
        """Reads a page, unless it is held."""
        return lru_cache(self.held)(self._read)

    def __getstate__(self) -> dict[str, Any]:
        """Without the pages that are held: another process reads its own."""
        return {name: value for name, value in vars(self).items() if name != "page"}

    def _read(self, number: int) -> KeyedRows:
        entries = self.directory[number : number + 1]
        (page,) = read_pages(self.files[entries["file"][0]], entries)
        return from_page(KeyedRows, page)


def _rows_of_branches(keyed: KeyedRows, branches: NDArray[np.int64]) -> KeyedRows:
    rows = keyed.rows
    no_prompt = np.zeros(len(rows), dtype=np.int64)
    short = replace(keyed, rows=rows.with_heads("prompts", no_prompt))
    return short.gather(rows.row_of_branch[branches], branches, np.arange(len(branches) + 1))


def first_of(ends: NDArray[np.int64], page: int) -> int:
    """The number at which a page begins."""
    return int(ends[page - 1]) if page else 0


def pages_between(ends: NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """The pages that hold the numbers `start` to `stop`, and which part of each does."""
    page = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        first, end = first_of(ends, page), min(stop, int(ends[page]))
        yield page, slice(start - first, end - first)
        page, start = page + 1, end
