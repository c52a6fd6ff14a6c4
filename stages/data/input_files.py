"""Data files and folders as streams of chunks and slices, never loaded whole."""

from __future__ import annotations

import codecs
import hashlib
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ...schemas.data_options import DataOptions
from ...schemas.errors import BadDataError, FingerprintError, UsageError
from .data_folders import ENDINGS, data_files
from .file_formats import FORMATS, WHOLE, FileRange, Limit, Payload, ending_of, json_columns
from .json_files import keys_among
from .packed_files import open_bytes

_DAMAGE = (BadDataError, pa.ArrowException, OSError, UnicodeError)


@dataclass(frozen=True)
class InputFile:
    """One file of preference data."""

    path: Path
    format: str  # the ending of its name, a key of FORMATS
    bytes: int


@dataclass(frozen=True)
class Digested:
    """The digest of a data file, and its version at that time."""

    bytes: int
    sha256: str
    version: tuple[int, int]  # inode and modification time, which change if a file is replaced


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file, not yet parsed.

    Rows are counted from 0 within their file, or within a range of it. Blank lines of JSONL and
    CSV and the CSV header are not rows and are not counted.
    """

    file: int  # index of the input; parsed records have the file's identity instead
    row: int  # of its first row
    payload: Payload

    def __len__(self) -> int:
        return len(self.payload)


def open_inputs(files: Sequence[str], split: str = "") -> tuple[InputFile, ...]:
    """The data files in these files and folders, each checked to have rows.

    Of folders with several splits the one is read that `split` names.
    """
    if not files:
        raise UsageError("No data files given. Name at least one file or folder.")
    inputs: dict[Path, InputFile] = {}
    for name in files:
        for path in data_files(Path(name), split):
            if path.resolve() in inputs:
                raise UsageError(f"{path} is given twice. Name every file once.")
            inputs[path.resolve()] = _opened(path)
    return tuple(inputs.values())


def inputs_of(data: DataOptions) -> tuple[InputFile, ...]:
    """The data files that the settings name."""
    return open_inputs(data.files, data.split)


def column_names(file: InputFile) -> tuple[str, ...]:
    """The columns of a file; of a JSON file, the keys of its first rows."""
    try:
        return FORMATS[file.format].columns(file.path)
    except _DAMAGE as error:
        raise _unreadable(file, error) from error


def keys_further_on(file: InputFile, names: Collection[str]) -> tuple[str, ...]:
    """Those of these names that are keys only of later rows of a JSON file."""
    if FORMATS[file.format].columns is not json_columns:
        return ()
    try:
        return tuple(keys_among(file.path, names))
    except _DAMAGE as error:
        raise _unreadable(file, error) from error


def _unreadable(file: InputFile, error: Exception) -> UsageError:
    return UsageError(
        f"{file.path} cannot be read as {file.format[1:]}: {_one_line(error)}. "
        "Check that the file is whole, or write it again."
    )


def iter_chunks(
    inputs: Sequence[InputFile],
    columns: Collection[str],
    *,
    rows_per_chunk: int = 1000,
    bytes_per_chunk: int = 8 << 20,
) -> Iterator[Chunk]:
    """Yields the rows of all files in order, with these columns."""
    limit = Limit(rows_per_chunk, bytes_per_chunk)
    for index, file in enumerate(inputs):
        yield from _chunks(file, index, columns, WHOLE, limit)


def iter_parts(
    file: InputFile, columns: Collection[str], count: int
) -> Iterator[Iterator[Payload]]:
    """Yields the payloads of about `count` parts of a file, of similar sizes in these columns."""
    most = max(1, data_bytes([file], columns) // count)
    for file_range in _ranges(file, columns, most):
        yield _payloads(file, columns, Limit(8192, 1 << 20), file_range)


@dataclass(frozen=True)
class Slice:
    """The input of one task: every `parts`-th chunk of a file range, beginning with `part`."""

    file: int  # index of the input
    file_range: FileRange
    part: int
    parts: int

    @property
    def bytes(self) -> int:
        """The bytes of data in its own chunks, approximately."""
        return self.file_range.bytes // self.parts


def data_bytes(inputs: Sequence[InputFile], columns: Collection[str]) -> int:
    """The bytes of data in the files, before compression where that is known."""
    return sum(
        file_range.bytes for file in inputs for file_range in _ranges(file, columns, sys.maxsize)
    )


def slices_of(
    inputs: Sequence[InputFile], columns: Collection[str], *, total: int
) -> tuple[Slice, ...]:
    """The slices of all files, in order; they depend on the files alone (`total` bytes)."""
    most = min(max(total // SLICES, LEAST_SLICE), LARGEST_SLICE)
    slices = []
    for index, file in enumerate(inputs):
        for file_range in _ranges(file, columns, most):
            parts = min(MOST_PARTS, max(1, file_range.bytes // most))
            slices += [Slice(index, file_range, part, parts) for part in range(parts)]
    return tuple(slices)


SLICES = 64  # of small data; large data have as many as LARGEST_SLICE asks for
LEAST_SLICE, LARGEST_SLICE = 2 << 20, 32 << 20
# A file that cannot be cut is read by every slice from its beginning: cheap beside encoding.
MOST_PARTS = 8


def iter_slice(
    inputs: Sequence[InputFile], part: Slice, columns: Collection[str]
) -> Iterator[tuple[Chunk, bool]]:
    """Yields all chunks of a slice's file range, and whether each is of the slice itself.

    Their rows are counted from the beginning of the range.
    """
    limit = Limit(1000, 8 << 20)
    chunks = _chunks(inputs[part.file], part.file, columns, part.file_range, limit)
    for number, chunk in enumerate(chunks):
        yield chunk, number % part.parts == part.part


def _chunks(
    file: InputFile, index: int, columns: Collection[str], file_range: FileRange, limit: Limit
) -> Iterator[Chunk]:
    row = 0
    for payload in _payloads(file, columns, limit, file_range):
        if len(payload):
            yield Chunk(index, row, payload)
        row += len(payload)


def _ranges(file: InputFile, columns: Collection[str], most: int) -> list[FileRange]:
    try:
        return FORMATS[file.format].ranges(file.path, columns, most)
    except _DAMAGE as error:
        raise BadDataError(
            f"{file.path} cannot be read: {_one_line(error)}. "
            "The file is damaged or incomplete: write it again."
        ) from error


def digested(file: InputFile) -> Digested:
    """The digest of a file, which is read once."""
    with file.path.open("rb") as source:
        found = os.fstat(source.fileno())
        sha256 = hashlib.file_digest(source, "sha256").hexdigest()
        return Digested(source.tell(), sha256, (found.st_ino, found.st_mtime_ns))


def require_unchanged(inputs: Sequence[InputFile], before: Sequence[Digested]) -> None:
    """Refuses files that changed while they were read."""
    for file, known in zip(inputs, before, strict=True):
        try:
            now = digested(file)
        except OSError as error:
            raise _changed(file, error.strerror or str(error)) from error
        if now != known:
            raise _changed(file, _how(known.bytes, now.bytes))


def require_same_version(file: InputFile, known: Digested) -> None:
    """Refuses a file that was replaced or modified, without reading it again."""
    try:
        found = file.path.stat()
    except OSError as error:
        raise _changed(file, error.strerror or str(error)) from error
    if (found.st_ino, found.st_mtime_ns) != known.version:
        raise _changed(file, _how(known.bytes, found.st_size))


def _how(before: int, now: int) -> str:
    sizes = f"it had {before:,} bytes and has {now:,}"
    return sizes if now != before else "it was written to, though its length is the same"


def _changed(file: InputFile, how: str) -> FingerprintError:
    return FingerprintError(
        f"{file.path} changed while it was read: {how}. Wait until no program writes to "
        "it, then run the same command again."
    )


def _payloads(
    file: InputFile, columns: Collection[str], limit: Limit, file_range: FileRange
) -> Iterator[Payload]:
    row = 0
    try:
        for payload in FORMATS[file.format].payloads(file.path, columns, limit, file_range):
            yield payload
            row += len(payload)
    except _DAMAGE as error:
        where = f" of its part from {file_range.start:,} on" if file_range.start else ""
        raise BadDataError(
            f"{file.path} cannot be read after row {row:,}{where}: {_one_line(error)}. "
            "The file is damaged or incomplete: write it again."
        ) from error


def _opened(path: Path) -> InputFile:
    ending = ending_of(path.name)
    if not ending:
        raise UsageError(f"{path} has an ending that is not known. Known are {ENDINGS}.")
    file = InputFile(path, ending, path.stat().st_size)
    if not file.bytes:
        raise UsageError(f"{path} is empty (0 bytes). Leave it out or write it again.")
    if _first_two_bytes(file) in {codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE}:
        raise UsageError(f"{path} is UTF-16 text. Save it as UTF-8.")
    if not column_names(file):
        raise UsageError(f"{path} has no rows. Leave it out or write it again.")
    return file


def _first_two_bytes(file: InputFile) -> bytes:
    try:
        with open_bytes(file.path) as source:
            return source.read(2)
    except OSError as error:
        if not error.strerror:  # of a codec
            raise _unreadable(file, error) from error
        raise UsageError(
            f"{file.path} cannot be opened: {error.strerror}. Check its rights."
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:500]
