"""Pages: Arrow record batches of one schema in a file, found by a directory at its end.

Pages wait in these files for hours while rows are scored, so each has a CRC-32, which is compared
whenever it is read. What stands behind the end of the stream is for those who wrote it; other Arrow
readers stop there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...schemas.errors import os_errors_as_storage_errors
from ...schemas.preparing import Block
from ..storage.cache.spool import NewPart, bytes_of, damaged_part

# An entry of a directory. A page without rows has no bytes.
PAGE = np.dtype(
    [
        ("number", "<u4"),  # of the page in its file
        ("schema", "<u4"),  # bytes of the schema, which is at the beginning of the file
        ("start", "<u8"),
        ("size", "<u4"),
        ("crc", "<u4"),
    ]
)
_OF_PAGES = [*(PAGE.names or ())]
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class PageWriter:
    """Writes pages to the beginning of a file, and then their directory."""

    def __init__(self, part: NewPart) -> None:
        self._part = part
        self._directory = bytearray()
        self._schema = b""
        self._number = 0

    def append(self, page: pa.RecordBatch, entry: NDArray[Any] | None = None) -> None:
        """Writes one page; its entry may have more fields than those of PAGE, which are filled."""
        if not self._schema:
            self._schema = page.schema.serialize().to_pybytes()
            self._part.write(self._schema)
        content = memoryview(page.serialize() if len(page) else b"")
        entry = np.zeros(1, PAGE) if entry is None else entry
        entry["number"], entry["schema"] = self._number, len(self._schema)
        entry["start"], entry["size"] = self._part.size, len(content)
        entry["crc"] = _checksum(self._number, self._schema, content)
        self._part.write(content)
        self._directory += entry.tobytes()
        self._number += 1

    def end(self) -> Block:
        """Writes the directory."""
        self._part.write(_END_OF_STREAM)
        return self._part.write_block(self._directory)


def read_directory(path: Path, block: Block, entry: np.dtype[Any] = PAGE) -> NDArray[Any]:
    """The entries of all pages of a file."""
    return np.frombuffer(bytes_of(path, block), dtype=entry)


def read_pages(path: Path, entries: NDArray[Any]) -> list[pa.RecordBatch]:
    """The pages of some entries that have rows."""
    pages: list[pa.RecordBatch] = []
    with os_errors_as_storage_errors("read", path):
        try:
            with path.open("rb") as file:
                for number, size, start, length, checksum in entries[_OF_PAGES].tolist():
                    file.seek(0)
                    schema = file.read(size)
                    file.seek(start)
                    content = file.read(length)
                    if _checksum(number, schema, content) != checksum:
                        raise damaged_part(path)
                    if content:
                        known = pa.ipc.read_schema(pa.py_buffer(schema))
                        pages.append(pa.ipc.read_record_batch(pa.py_buffer(content), known))
        except FileNotFoundError:
            raise damaged_part(path) from None
    return pages


def _checksum(number: int, schema: bytes, content: bytes | memoryview) -> int:
    """It begins with the number, so that neither zeros nor another page are taken for one."""
    return crc32(content, crc32(schema, number + 1))
