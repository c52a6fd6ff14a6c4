"""Append-only files of lines; an incomplete last line counts as not written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ....schemas.errors import os_errors_as_storage_errors
from . import fs


class Lines:
    """A file to which lines are appended, each by one write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with os_errors_as_storage_errors("open", path):
            self._descriptor = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o666)

    def append(self, text: bytes) -> None:
        """Appends a line, with a newline."""
        with os_errors_as_storage_errors("write", self._path, len(text)):
            rest = text + b"\n"
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Makes all lines durable."""
        with os_errors_as_storage_errors("fsync", self._path):
            os.fsync(self._descriptor)
        fs.fsync(self._path.parent)

    def close(self) -> None:
        """Closes the file."""
        with os_errors_as_storage_errors("write", self._path):
            os.close(self._descriptor)


class Line(NamedTuple):
    """One line, read back."""

    text: bytes  # with its newline
    end: int  # start of the next line, in bytes


def read_lines(path: Path, start: int = 0) -> Iterator[Line]:
    """The complete lines from a byte offset on."""
    with fs.open_file(path) as source, os_errors_as_storage_errors("read", path):
        source.seek(start)
        while (text := source.readline()).endswith(b"\n"):
            start += len(text)
            yield Line(text, start)


def keep_lines(path: Path, kept: Sequence[Line]) -> None:
    """Removes all other lines, and an incomplete last one, atomically."""
    content = b"".join(line.text for line in kept)
    if len(content) < path.stat().st_size:
        fs.publish(path, content)
