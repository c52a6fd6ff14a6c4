"""The rows of a CSV or TSV file; those that are too long are passed over."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from io import StringIO, TextIOWrapper
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
        self._of_row: list[str] = []  # the lines of the row that is being read
        self._count_before = 0
        self._left = self._most = most
        self._file = file
        self._ahead = StringIO()  # what was read behind a long row
        self._readline: Callable[[int], str] = file.readline

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._readline(self._left + 1)
        self._left -= len(line)
        self._of_row.append(line)
        if self._left < 0:
            self.is_long = True
            raise StopIteration
        if not line:
            raise StopIteration
        self.count += 1
        return line

    def begin_row(self) -> None:
        """Forgets the lines of the row before."""
        self._of_row.clear()
        self._count_before = self.count
        self._left, self.is_long = self._most, False

    def blocks(self) -> Iterator[str]:
        """The text of a long row so far, and what follows it, in blocks."""
        yield "".join(self._of_row)
        self._readline = self._file.readline
        while text := self._ahead.read() or self._file.read(BLOCK_BYTES):
            yield text

    def end_row(self, lines: int, behind: str) -> None:
        """Goes on behind a long row of so many lines; this was read already."""
        self.count = self._count_before + lines
        self._ahead = StringIO(behind + self._ahead.read(), newline="")
        self._readline = self._line_ahead

    def _line_ahead(self, size: int) -> str:
        line = self._ahead.readline(size)
        if len(line) == size or line.endswith(("\r", "\n")):
            return line
        self._readline = self._file.readline
        return line + self._file.readline(size - len(line))


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
    state, size, count = _Scan(delimiter), 0, 0
    for text in lines.blocks():
        end = state.end_in(text)
        row = text if end is None else text[:end]
        size, count = size + len(row), count + row.count("\n")
        if end is not None:
            lines.end_row(count, text[end:])
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
        self._quotes = re.compile(r'"++')
        self._mark = delimiter
        self._state = "start"  # of a cell; or "plain", "quoted", "quote", which may be its last

    @property
    def is_quoted(self) -> bool:
        """Whether the text ends within quotes."""
        return self._state == "quoted"

    def end_in(self, text: str) -> int | None:
        """Where in this text, which goes on from the one before, the row ends; or None."""
        if self._state == "plain" and not any(mark in text for mark in ("\r", "\n", self._mark)):
            return None
        at = 0
        while at < len(text):
            if self._state == "quote" and text[at] == '"':  # the second of two
                self._state, at = "quoted", at + 1
            elif self._state == "quoted":
                at = self._pass_quoted(text, at)
            elif text[at] in "\r\n":
                return at + (2 if text.startswith("\r\n", at) else 1)
            elif text[at] == self._mark:
                self._state, at = "start", at + 1
            elif self._state == "quote":
                raise csv.Error(f"{self._mark!r} expected after '\"'")
            elif self._state == "start":
                at = _behind(self._cells, text, at)
                at = self._begin_cell(text, at)
            else:
                at = _behind(self._rest, text, at)
        return None

    def _pass_quoted(self, text: str, at: int) -> int:
        """Goes behind the next quotes, of which two are one that is in the cell."""
        if (first := text.find('"', at)) < 0:
            return len(text)
        end = _behind(self._quotes, text, first)
        if (end - first) % 2:
            self._state = "quote"
        return end

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
