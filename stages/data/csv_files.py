"""The rows of a CSV or TSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from ...schemas.errors import BadDataError
from .packed_files import BLOCK_BYTES, open_bytes

LONGEST_CELL = 1 << 24  # characters


def csv_rows(path: Path) -> Iterator[list[str]]:
    """Yields the rows that are not blank, the header first."""
    # Python's own limit ends files with long answers; it is the process's, and others keep theirs.
    usual = csv.field_size_limit(LONGEST_CELL)
    with _open_text(path) as file:
        reader = csv.reader(file, strict=True, delimiter=_delimiter(path))
        try:
            yield from filter(None, reader)
        except csv.Error as error:
            raise BadDataError(f"line {reader.line_num:,} is not valid CSV ({error})") from None
        finally:
            csv.field_size_limit(usual)


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
    # Line ends within quotes stay as they are, and bytes that are no text are reported row by row.
    return TextIOWrapper(open_bytes(path), "utf-8-sig", "surrogateescape", newline="")
