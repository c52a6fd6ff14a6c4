"""The rows of a CSV or TSV file; those that are too long are passed over."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from ...schemas.errors import BadDataError
from .large_rows import MOST_ROW_BYTES, LongRow
from .packed_files import BLOCK_BYTES, open_bytes


def csv_rows(path: Path, most: int = MOST_ROW_BYTES) -> Iterator[list[str] | LongRow]:
    """Yields the rows that are not blank, the header first."""
    delimiter = _delimiter(path)
    with _open_text(path) as file:
        lines = _Lines(file, most)
        reader = csv.reader(lines, strict=True, delimiter=delimiter)
        try:
            while (row := _next_row(reader, lines, most)) is not None or lines.is_long:
                if lines.is_long:
                    yield LongRow(_pass_over(lines, delimiter))
                    reader = csv.reader(lines, strict=True, delimiter=delimiter)
                elif row:
                    yield row
        except csv.Error as error:
            raise BadDataError(f"line {lines.count:,} is not valid CSV ({error})") from None


class _Lines:
    """The lines of a text, until a row has more characters than it may."""

    def __init__(self, file: TextIOWrapper, most: int) -> None:
        self.count = 0
        self.is_long = False
        self.of_row: list[str] = []  # the lines of the row that is being read
        self._left = self._most = most
        self._file = file

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(self._left + 1)
        self._left -= len(line)
        self.of_row.append(line)
        if self._left < 0:
            self.is_long = True
            raise StopIteration
        if not line:
            raise StopIteration
        self.count += 1
        return line

    def begin_row(self) -> None:
        """Forgets the lines of the row before."""
        self.of_row.clear()
        self._left, self.is_long = self._most, False

    def rest(self) -> Iterator[str]:
        """The text of a long row so far, and what follows it, up to an end of line each."""
        yield from self.of_row
        while text := self._file.readline(BLOCK_BYTES):
            yield text


def _next_row(reader: Iterator[list[str]], lines: _Lines, most: int) -> list[str] | None:
    """A row, read under our limit for a cell; the process's limit is restored after each."""
    lines.begin_row()
    limit = csv.field_size_limit(most + 1)
    try:
        return next(reader, None)
    except csv.Error:
        if lines.is_long:  # it says that the text ends within quotes
            return []
        raise
    finally:
        csv.field_size_limit(limit)


def _pass_over(lines: _Lines, delimiter: str) -> int:
    """The length of a row that is passed over, in characters."""
    state, size = _Scan(delimiter), 0
    for text in lines.rest():
        size += len(text)
        lines.count += text.endswith("\n")
        if state.ends_in(text):
            return size
    if state.is_quoted:
        raise csv.Error("unexpected end of data")
    return size


class _Scan:
    """Where in a row of CSV a text ends: within a quoted cell, or not."""

    def __init__(self, delimiter: str) -> None:
        mark = re.escape(delimiter)
        # Cells without quotes, each with the mark behind it.
        self._cells = re.compile(rf'(?:{mark}|[^"{mark}\r\n][^{mark}\r\n]*+{mark})*+')
        self._rest = re.compile(rf"[^{mark}\r\n]*+")
        self._quoted = re.compile(r'(?:[^"]++|"")*+')
        self._mark = delimiter
        self._state = "start"  # of a cell; or "plain", "quoted", "quote", which may be its last

    @property
    def is_quoted(self) -> bool:
        """Whether the text ends within quotes."""
        return self._state == "quoted"

    def ends_in(self, text: str) -> bool:
        """Whether the row ends in this text, which goes on from the one before."""
        at = 0
        while at < len(text):
            if self._state == "quote" and text[at] == '"':  # the second of two
                self._state, at = "quoted", at + 1
            elif self._state == "quoted":
                at = _behind(self._quoted, text, at)
                if at < len(text):
                    self._state, at = "quote", at + 1
            elif text[at] in "\r\n":
                return True
            elif text[at] == self._mark:
                self._state, at = "start", at + 1
            elif self._state == "quote":
                raise csv.Error(f"{self._mark!r} expected after '\"'")
            elif self._state == "start":
                at = _behind(self._cells, text, at)
                at = self._begin_cell(text, at)
            else:
                at = _behind(self._rest, text, at)
        return False

    def _begin_cell(self, text: str, at: int) -> int:
        """Goes into the cell that begins here, if one does before the end of the text."""
        if at < len(text) and text[at] == '"':
            self._state = "quoted"
            return at + 1
        if at < len(text) and text[at] not in "\r\n":
            self._state = "plain"
        return at


def _behind(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _delimiter(path: Path) -> str:
    """Tabs of a TSV file; of a CSV file commas, unless its header has none but semicolons."""
    if ".tsv" in path.suffixes[-2:]:
        return "\t"
    with _open_text(path) as file:
        header = ""
        while not header.strip() and (header := file.readline(BLOCK_BYTES)):
            pass
    return next((mark for mark in ",;\t" if mark in header), ",")


def _open_text(path: Path) -> TextIOWrapper:
    return TextIOWrapper(open_bytes(path), "utf-8-sig", "surrogateescape", newline="")
