"""Columns of rows in flat files on disk, appended once and read by range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schemas.row_keys import KeyedRows
from ...schemas.rows import PromptKeys, Ragged, RowBlock
from .number_files import Summed, SummedWriter

KEY = "<u8"
ROW_COLUMNS = {
    "places": KEY,
    "row_id": "S16",
    "copy": "<i4",
    "file": KEY,
    "row": "<i8",
    "prompt_key": "S16",
    "split_key": KEY,
    "prompt_sketch": KEY,
    "prompt_cut": "<i4",
    "prompt_ends": "<i8",
    "branch_ends": "<i8",
}
BRANCH_COLUMNS = {
    "completion_keys": KEY,
    "completion_ends": "<i8",
    "roles": "i1",
    "scores": "<f8",
    "cut": "<i4",
}
VALUE_COLUMNS = {"prompt_values": "<i4", "completion_values": "<i4"}
# Completions this close together are read in one go.
NEARBY = 4096
# What a stretch holds at most, where rows are gone through from end to end.
STRETCH_ROWS = 4096
STRETCH_COMPLETIONS = 65536


class SpoolWriter:
    """Appends rows; use as a context manager, which makes them durable at the end."""

    def __init__(self, folder: Path, *, carried: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = [*ROW_COLUMNS, *BRANCH_COLUMNS, *VALUE_COLUMNS, *map(_carried_file, carried)]
        self._stack = ExitStack()
        self._files = {
            name: self._stack.enter_context(SummedWriter(folder / f"{name}.bin")) for name in names
        }
        self._ends = {"prompt_ends": 0, "branch_ends": 0, "completion_ends": 0}
        self.num_rows = 0

    def __enter__(self) -> SpoolWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def append(self, keyed: KeyedRows) -> None:
        """Adds rows after those already there."""
        rows = keyed.rows
        self._write("places", keyed.places)
        self._write("completion_keys", keyed.completion_keys)
        for name in ("row_id", "copy", "file", "row", "prompt_cut", "roles", "scores", "cut"):
            self._write(name, getattr(rows, name))
        self._write("prompt_key", rows.prompt_keys.prompt)
        self._write("split_key", rows.prompt_keys.split)
        self._write("prompt_sketch", rows.prompt_keys.sketch)
        self._write_ends("prompt_ends", rows.prompts.offsets)
        self._write_ends("branch_ends", rows.branch_offsets)
        self._write_ends("completion_ends", rows.completions.offsets)
        self._write("prompt_values", rows.prompts.values)
        self._write("completion_values", rows.completions.values)
        for name, column in rows.carried.items():
            self._write(_carried_file(name), column)
        self.num_rows += len(rows)

    def _write(self, name: str, column: NDArray[Any]) -> None:
        self._files[name].write(column)

    def _write_ends(self, name: str, offsets: NDArray[np.int64]) -> None:
        self._write(name, offsets[1:] + self._ends[name])
        self._ends[name] += int(offsets[-1])


@dataclass(frozen=True)
class Spool:
    """Rows that a SpoolWriter wrote."""

    folder: Path
    carried: tuple[str, ...]

    def __len__(self) -> int:
        return len(self._file("row"))

    @property
    def num_completions(self) -> int:
        """Completions of all rows together."""
        return len(self._file("completion_ends"))

    @property
    def is_there(self) -> bool:
        """Whether all of its files exist."""
        names = [*ROW_COLUMNS, *BRANCH_COLUMNS, *VALUE_COLUMNS, *map(_carried_file, self.carried)]
        return all(self._file(name).is_there for name in names)

    def column(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """One flat column, or a range of it."""
        return self._file(name).read(start, stop)

    def read(self, start: int, stop: int) -> KeyedRows:
        """Rows `start` to `stop`."""
        branches = self.offsets("branch_ends", start, stop)
        first, last = int(branches[0]), int(branches[-1])
        per_row = {name: self.column(name, start, stop) for name in ROW_COLUMNS}
        per_branch = {name: self.column(name, first, last) for name in BRANCH_COLUMNS}
        rows = RowBlock(
            row_id=per_row["row_id"],
            copy=per_row["copy"],
            file=per_row["file"],
            row=per_row["row"],
            prompt_keys=PromptKeys(
                per_row["prompt_key"], per_row["split_key"], per_row["prompt_sketch"]
            ),
            prompts=self._lists("prompt", start, stop),
            prompt_cut=per_row["prompt_cut"],
            branch_offsets=branches - first,
            completions=self._lists("completion", first, last),
            roles=per_branch["roles"],
            scores=per_branch["scores"],
            cut=per_branch["cut"],
            carried={name: self.column(_carried_file(name), start, stop) for name in self.carried},
        )
        return KeyedRows(rows, per_row["places"], per_branch["completion_keys"])

    def completions(self, indices: NDArray[np.int64]) -> Ragged:
        """The completions at `indices`, wherever they lie, reading neighbours together."""
        unique, back = np.unique(indices, return_inverse=True)
        breaks = np.flatnonzero(np.diff(unique) > NEARBY) + 1
        parts = []
        for group in np.split(unique, breaks) if len(unique) else []:
            nearby = self._lists("completion", int(group[0]), int(group[-1]) + 1)
            parts.append(nearby.take(group - group[0]))
        return Ragged.concat(parts).take(back) if parts else Ragged.of([], np.int32)

    def cuts(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """How many tokens the completions at `indices`, wherever they lie, have already lost."""
        return self._file("cut").at(indices)

    def stretches(self) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """All rows in bounded parts.

        With the rows, from a first to a last, come the offsets of their branches.
        """
        start = 0
        while start < len(self):
            stop = min(start + STRETCH_ROWS, len(self))
            branches = self.offsets("branch_ends", start, stop)
            most = int(branches[0]) + STRETCH_COMPLETIONS
            fit = int(np.searchsorted(branches[1:], most, side="right"))
            stop = start + max(fit, 1)
            yield start, stop, branches[: stop - start + 1]
            start = stop

    def between(self, first_key: int, last_key: int) -> tuple[int, int]:
        """The range of rows whose ring positions lie between two, both included."""
        places = self._file("places")
        first = places.search(np.uint64(first_key), "left")
        return first, places.search(np.uint64(last_key), "right", start=first)

    def between_ids(self, start: int, stop: int, first: bytes, last: bytes) -> tuple[int, int]:
        """Of rows of one prompt, those whose ids lie between two, both included."""
        ids = self._file("row_id")
        low = ids.search(np.bytes_(first), "left", start=start, stop=stop)
        return low, ids.search(np.bytes_(last), "right", start=low, stop=stop)

    def offsets(self, name: str, start: int, stop: int) -> NDArray[np.int64]:
        """Where the lists `start` to `stop` begin, and where the last of them ends."""
        if start == 0:
            return np.append(np.int64(0), self.column(name, 0, stop))
        return self.column(name, start - 1, stop)

    def _file(self, name: str) -> Summed:
        kinds = {**ROW_COLUMNS, **BRANCH_COLUMNS, **VALUE_COLUMNS}
        return Summed(self.folder / f"{name}.bin", kinds.get(name, "<f8"))

    def _lists(self, name: str, start: int, stop: int) -> Ragged:
        offsets = self.offsets(f"{name}_ends", start, stop)
        values = self.column(f"{name}_values", int(offsets[0]), int(offsets[-1]))
        return Ragged(values, offsets - offsets[0])


def _carried_file(name: str) -> str:
    return f"carried-{name.encode().hex()}"
