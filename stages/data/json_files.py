"""The records of a JSON file as raw bytes: of lines, of one large array, or of an object's."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...schemas.errors import BadDataError
from .large_rows import MOST_ROW_BYTES, LongRow
from .packed_files import BLOCK_BYTES, open_bytes

_BYTE_ORDER_MARK = codecs.BOM_UTF8
_SPACE = re.compile(r"[ \t\n\r]*")
# An object whose rows are the array "data", with nothing but short facts before it.
_FACT = r'\s*"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*,'
_DATA = re.compile(rf'\s*\{{(?:{_FACT})*\s*"data"\s*:\s*(?=\[)')
_raw_decode = json.JSONDecoder().raw_decode


def json_rows(
    path: Path, *, start: int = 0, stop: int = sys.maxsize, most: int = MOST_ROW_BYTES
) -> Iterator[bytes | LongRow]:
    """Yields each record's raw text, without parsing it; of one longer than `most`, its length.

    A file that starts with `[` is one array, read through a sliding buffer, and so is one that is
    an object with its rows in `data`; any other holds one record per line, and blank lines are not
    records. Of lines, those are read that begin at one of the bytes `start` to `stop`; an array is
    always read whole.
    """
    with open_bytes(path) as file:
        yield from _lines(file, start, stop, most) if is_json_lines(path) else _elements(file, most)


def keys_among(path: Path, names: Collection[str]) -> list[str]:
    """Those of these names that are keys of at least one record."""
    left = {
        name: {json.dumps(name, ensure_ascii=plain).encode() for plain in (True, False)}
        for name in names
    }
    for text in json_rows(path):
        if isinstance(text, LongRow):
            continue
        near = [name for name, written in left.items() if any(form in text for form in written)]
        for name in near:
            if name in keys_of(text):
                del left[name]
        if not left:
            break
    return [name for name in names if name not in left]


def keys_of(text: bytes) -> Iterable[str]:
    """The keys of a record; none if it is not an object."""
    try:
        row: Any = json.loads(text.decode())
    except (ValueError, RecursionError):
        return ()
    return row if isinstance(row, dict) else ()


def is_json_lines(path: Path) -> bool:
    """Whether a file has one record per line, and is neither an array nor an object around one."""
    with open_bytes(path) as file:
        block = _first_block(file)
    if block[:1] != b"{":
        return block[:1] != b"["
    text = block.decode("utf-8", "replace")
    return not _DATA.match(text) or _is_first_of_lines(text)


def _first_block(file: BinaryIO) -> bytes:
    """A block of a file that begins with its first byte that is not blank."""
    block = file.read(BLOCK_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip()
    while not block and (block := file.read(BLOCK_BYTES)):
        block = block.lstrip()
    return block


def _is_first_of_lines(text: str) -> bool:
    """Whether an object ends in its line, and others follow it."""
    try:
        _, end = _raw_decode(text)
    except (ValueError, RecursionError):
        return False
    rest = text[end:].lstrip(" \t\r")
    return rest.startswith("\n") and not rest.isspace()


def _lines(file: BufferedReader, start: int, stop: int, most: int) -> Iterator[bytes | LongRow]:
    position = start
    if start:
        file.seek(start - 1)
        # The rest of a line that begins before the range, which may end behind it.
        position += _pass_line(file, stop - start + 1)[0] - 1
    while position < stop and (line := file.readline(most + 1)):
        text = line if position else line.removeprefix(_BYTE_ORDER_MARK)
        position += len(line)
        is_blank = not text or text.isspace()
        if len(line) > most and not line.endswith(b"\n"):
            length, is_rest_blank = _pass_line(file)
            position += length
            if not (is_blank and is_rest_blank):
                yield LongRow(len(line) + length)
        elif is_blank:
            position += _pass_blank_lines(file)
        else:
            yield text


def _pass_blank_lines(file: BufferedReader) -> int:
    """Passes over the lines ahead that are whole and blank, and returns their length."""
    passed = 0
    while block := file.peek():
        end = block.rfind(b"\n", 0, len(block) - len(block.lstrip())) + 1
        if not end:
            break
        passed += len(file.read(end))
    return passed


def _pass_line(file: BinaryIO, most: int = sys.maxsize) -> tuple[int, bool]:
    """Passes over the rest of a line, or so much of it: its length, and whether it is blank."""
    length, is_blank = 0, True
    while length < most and (piece := file.readline(min(BLOCK_BYTES, most - length))):
        length += len(piece)
        is_blank = is_blank and piece.isspace()
        if piece.endswith(b"\n"):
            break
    return length, is_blank


def _elements(file: BinaryIO, most: int) -> Iterator[bytes | LongRow]:
    window = _Window(file)
    is_inside = window.skip(_DATA)
    window.next_character()
    window.at += 1
    count = 0
    if window.next_character() != "]":
        while True:
            yield window.element(count, most)
            count += 1
            if (separator := window.next_character()) != ",":
                break
            window.at += 1
            window.next_character()
        if separator != "]":
            found = repr(separator) if separator else "the end of the file"
            raise _broken(count - 1, f"is followed by {found}")
    window.at += 1
    if is_inside and window.next_character() == "}":
        window.at += 1
    elif is_inside:
        raise BadDataError(
            "the object goes on after its array 'data': write a file of the array alone"
        )
    if rest := window.next_character():
        raise BadDataError(f"after the closing bracket of {count:,} elements comes {rest!r}")


class _Window:
    """The part of a text file in memory that has not been consumed."""

    def __init__(self, file: BinaryIO) -> None:
        self.at = 0
        self._file = file
        self._text = ""
        self._ended = False
        # Invalid bytes survive as surrogates, so that they can be reported row by row.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")

    def skip(self, pattern: re.Pattern[str]) -> bool:
        """Moves past a pattern in the first block, if the file begins with it."""
        self.next_character()
        found = pattern.match(self._text, self.at)
        self.at = found.end() if found else self.at
        return bool(found)

    def next_character(self) -> str:
        """Moves to the next character that is not blank and returns it; empty at the end."""
        while True:
            blank = _SPACE.match(self._text, self.at)
            self.at = blank.end() if blank else self.at
            if self.at < len(self._text) or not self._read_more():
                return self._text[self.at : self.at + 1]

    def element(self, index: int, most: int) -> bytes | LongRow:
        """Moves past one JSON value and returns its text, or its length if it is longer."""
        while (end := self._end_of_value(index)) is None:
            if len(self._text) - self.at > most:
                return LongRow(self._pass_value(index))
            if not self._read_more():
                raise _broken(index, "is cut off")
        text = self._text[self.at : end]
        self.at = end
        encoded = text.encode("utf-8", "surrogateescape")
        return encoded if len(encoded) <= most else LongRow(len(encoded))

    def _pass_value(self, index: int) -> int:
        """Moves past a value without parsing it, and returns its length."""
        length, state = 0, _Nesting()
        while True:
            block = self._text[self.at :].encode("utf-8", "surrogateescape")
            end = state.end_in(block)
            length += len(block) if end is None else end
            if end is not None:
                self.at += len(block[:end].decode("utf-8", "surrogateescape"))
                return length
            self.at = len(self._text)
            if not self._read_more():
                raise _broken(index, "is cut off")

    def _end_of_value(self, index: int) -> int | None:
        try:
            _, end = _raw_decode(self._text, self.at)
        except json.JSONDecodeError as error:
            # Text that is only incomplete fails at its very end, or at an unterminated string.
            is_open = error.msg.startswith("Unterminated")
            if is_open or (error.pos > len(self._text) - 16 and not self._ended):
                return None
            raise _broken(index, f"is not valid JSON ({error.msg})") from None
        except (RecursionError, ValueError) as error:
            raise _broken(index, f"cannot be read ({error})") from None
        # A number at the end of the buffer may continue after it.
        return end if end < len(self._text) else None

    def _read_more(self) -> bool:
        if self._ended:
            return False
        kept = self._text[self.at :]
        # Doubling keeps the work linear when one value is longer than many blocks.
        block = self._file.read(max(BLOCK_BYTES, len(kept)))
        self._ended = not block
        self._text = kept + self._decoder.decode(block, self._ended)
        self.at = 0
        return True


class _Nesting:
    """How deep in brackets a text ends, and whether within quotes; a block at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._quotes = 0
        self._is_escaped = False

    def end_in(self, block: bytes) -> int | None:
        """The end of the value in this text, which goes on from the one before; or None."""
        is_text = b'"' not in block and b"\\" not in block
        if is_text and self._quotes % 2 and not self._is_escaped:
            return None  # within a string, which has no end here
        whole = b"\\" + block if self._is_escaped else block
        plain = _ESCAPED.sub(b"..", whole) if b"\\" in whole else whole
        self._is_escaped = plain.endswith(b"\\")
        marks = _MARKS[np.frombuffer(plain, np.uint8)[len(whole) - len(block) :]]
        places = np.flatnonzero(marks)
        marks = marks[places]
        is_quote = marks == _QUOTE
        is_outside = (np.cumsum(is_quote) + self._quotes) % 2 == 0
        depths = self._depth + np.cumsum(_STEPS[marks] * is_outside)
        is_last = is_outside & (depths == 0) & ((marks == _CLOSES) | is_quote)
        is_behind = is_outside & ((depths < 0) | ((depths == 0) & (marks == _COMMA)))
        ends = [places[is_last][:1] + 1, places[is_behind][:1]]
        if found := [int(end[0]) for end in ends if len(end)]:
            return min(found)
        if len(marks):
            self._depth = int(depths[-1])
            self._quotes += int(is_quote.sum())
        return None


_QUOTE, _OPENS, _CLOSES, _COMMA = range(1, 5)  # what a byte may be; any other is 0
_MARKS = np.zeros(256, np.uint8)
_MARKS[[*b'"[{]},']] = _QUOTE, _OPENS, _OPENS, _CLOSES, _CLOSES, _COMMA
_STEPS = np.array([0, 0, 1, -1, 0])  # how much deeper each leads
_ESCAPED = re.compile(rb"\\[\s\S]")


def _broken(index: int, what: str) -> BadDataError:
    return BadDataError(f"element {index:,} of the array {what}, so the rest cannot be read")
