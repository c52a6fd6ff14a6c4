"""Files of lines that grow at their end: a last line that was cut off counts as not written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ....schemas.errors import os_errors_as_storage_errors
from . import fs


class Lines:
    """A file that lines are appended to; each is handed to the system at once and as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with os_errors_as_storage_errors("open", path):
            self._descriptor = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o666)

    def append(self, text: bytes) -> None:
        """Writes a line, to which its end is added."""
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

    text: bytes  # with its end
    end: int  # where the next line begins, in bytes


def read_lines(path: Path, start: int = 0) -> Iterator[Line]:
    """The whole lines from a byte on."""
    with fs.open_file(path) as source, os_errors_as_storage_errors("read", path):
        source.seek(start)
        while (text := source.readline()).endswith(b"\n"):
            start += len(text)
            yield Line(text, start)


def keep_lines(path: Path, kept: Sequence[Line]) -> None:
    """Cuts out all other lines, and a last one that was cut off; the file is old or new."""
    content = b"".join(line.text for line in kept)
    if len(content) < path.stat().st_size:
        fs.publish(path, content)
