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

from ...schemas.errors import BadDataError
from .packed_files import BLOCK_BYTES, open_bytes

_BYTE_ORDER_MARK = codecs.BOM_UTF8
_SPACE = re.compile(r"[ \t\n\r]*")
# An object whose rows are the array "data", with nothing but short facts before it.
_FACT = r'\s*"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*,'
_DATA = re.compile(rf'\s*\{{(?:{_FACT})*\s*"data"\s*:\s*(?=\[)')
_raw_decode = json.JSONDecoder().raw_decode


def json_rows(path: Path, *, start: int = 0, stop: int = sys.maxsize) -> Iterator[bytes]:
    """Yields each record's raw text, without parsing it.

    A file that starts with `[` is one array, read through a sliding buffer, and so is one that is
    an object with its rows in `data`; any other holds one record per line, and blank lines are not
    records. Of lines, those are read that begin at one of the bytes `start` to `stop`; an array is
    always read whole.
    """
    with open_bytes(path) as file:
        yield from _lines(file, start, stop) if is_json_lines(path) else _elements(file)


def keys_among(path: Path, names: Collection[str]) -> list[str]:
    """Those of these names that are keys of at least one record."""
    left = {
        name: {json.dumps(name, ensure_ascii=plain).encode() for plain in (True, False)}
        for name in names
    }
    for text in json_rows(path):
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


def _lines(file: BufferedReader, start: int, stop: int) -> Iterator[bytes]:
    position = start
    if start:
        file.seek(start - 1)
        position += len(file.readline()) - 1  # the rest of a line that begins before the range
    while position < stop and (line := file.readline()):
        text = line if position else line.removeprefix(_BYTE_ORDER_MARK)
        position += len(line)
        if text and not text.isspace():
            yield text


def _elements(file: BinaryIO) -> Iterator[bytes]:
    window = _Window(file)
    is_inside = window.skip(_DATA)
    window.next_character()
    window.at += 1
    count = 0
    if window.next_character() != "]":
        while True:
            yield window.element(count)
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

    def element(self, index: int) -> bytes:
        """Moves past one JSON value and returns its text."""
        while (end := self._end_of_value(index)) is None:
            if not self._read_more():
                raise _broken(index, "is cut off")
        text = self._text[self.at : end]
        self.at = end
        return text.encode("utf-8", "surrogateescape")

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


def _broken(index: int, what: str) -> BadDataError:
    return BadDataError(f"element {index:,} of the array {what}, so the rest cannot be read")
