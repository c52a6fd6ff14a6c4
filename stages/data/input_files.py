"""Scans files and folders as a stream of chunks, never loading them whole."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ...schemas.errors import BadDataError, FingerprintError, UsageError
from ...schemas.plain_names import is_plain_name
from .file_formats import FORMATS, WHOLE, FileStretch, Limit, Payload, json_columns
from .json_files import keys_among

_DAMAGE = (BadDataError, pa.ArrowException, OSError, UnicodeError)
# As `datasets` and the Hugging Face Hub name the files of one data set.
_PART = re.compile(r"(?P<set>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_SIDECARS = {"dataset_info.json", "dataset_infos.json"}  # of `datasets`, beside the data


@dataclass(frozen=True)
class InputFile:
    """One file of preference data."""

    path: Path
    format: str  # its ending, a key of FORMATS
    bytes: int


@dataclass(frozen=True)
class Digested:
    """A data file as it was when its bytes were digested."""

    bytes: int
    sha256: str
    version: tuple[int, int]  # inode and time of change: both change with a file that is replaced


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file, not yet parsed; cheap to send to another process.

    Rows are counted from 0 within their file, or within their stretch of it.
    Blank lines of JSONL and CSV and the CSV header
    are not rows and are not counted.
    """

    file: int  # which of the inputs; what is parsed of it is named by the file's identity
    row: int  # of its first row
    payload: Payload

    def __len__(self) -> int:
        return len(self.payload)


def open_inputs(files: Sequence[str]) -> tuple[InputFile, ...]:
    """Returns the data files among these files and folders, each checked to have rows."""
    if not files:
        raise UsageError("No data files given. Name at least one file or folder.")
    inputs: dict[Path, InputFile] = {}
    for name in files:
        for path in _data_files(Path(name)):
            if path.resolve() in inputs:
                raise UsageError(f"{path} is given twice. Name every file once.")
            inputs[path.resolve()] = _opened(path)
    return tuple(inputs.values())


def column_names(file: InputFile) -> tuple[str, ...]:
    """Returns the columns of a file; of a JSON file, the keys of its first rows."""
    try:
        return FORMATS[file.format].columns(file.path)
    except _DAMAGE as error:
        raise _unreadable(file, error) from error


def keys_further_on(file: InputFile, names: Collection[str]) -> tuple[str, ...]:
    """Which of these are columns of a JSON file that `column_names` does not find."""
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


def iter_places(
    file: InputFile, columns: Collection[str], places: int
) -> Iterator[Iterator[Payload]]:
    """Yields the payloads of each part of a file; the parts hold about as much of these columns."""
    most = max(1, data_bytes([file], columns) // places)
    for stretch in _stretches(file, columns, most):
        yield _payloads(file, columns, Limit(8192, 1 << 20), stretch)


@dataclass(frozen=True)
class Slice:
    """What one task reads: of the chunks of a stretch every `shares`-th, beginning with `share`."""

    file: int  # which of the inputs
    stretch: FileStretch
    share: int
    shares: int

    @property
    def bytes(self) -> int:
        """How much data its own chunks hold, about."""
        return self.stretch.bytes // self.shares


def data_bytes(inputs: Sequence[InputFile], columns: Collection[str]) -> int:
    """How much data the files hold, before compression where that is known."""
    return sum(
        stretch.bytes for file in inputs for stretch in _stretches(file, columns, sys.maxsize)
    )


def slices_of(
    inputs: Sequence[InputFile], columns: Collection[str], *, total: int
) -> tuple[Slice, ...]:
    """The slices of all files, in order: set by the files alone, whose data are `total` bytes."""
    most = min(max(total // SLICES, LEAST_SLICE), LARGEST_SLICE)
    slices = []
    for index, file in enumerate(inputs):
        for stretch in _stretches(file, columns, most):
            shares = min(MOST_SHARES, max(1, stretch.bytes // most))
            slices += [Slice(index, stretch, share, shares) for share in range(shares)]
    return tuple(slices)


SLICES = 64  # of small data; of large data there are as many as its size asks for
LEAST_SLICE, LARGEST_SLICE = 2 << 20, 32 << 20
# What cannot be cut is read by every share from its beginning: cheap beside encoding a part of it.
MOST_SHARES = 8


def iter_slice(
    inputs: Sequence[InputFile], part: Slice, columns: Collection[str]
) -> Iterator[tuple[Chunk, bool]]:
    """Yields all chunks of a slice's stretch, and whether each is of the slice itself.

    Their rows are counted from the beginning of the stretch.
    """
    limit = Limit(1000, 8 << 20)
    chunks = _chunks(inputs[part.file], part.file, columns, part.stretch, limit)
    for number, chunk in enumerate(chunks):
        yield chunk, number % part.shares == part.share


def _chunks(
    file: InputFile, index: int, columns: Collection[str], stretch: FileStretch, limit: Limit
) -> Iterator[Chunk]:
    row = 0
    for payload in _payloads(file, columns, limit, stretch):
        if len(payload):
            yield Chunk(index, row, payload)
        row += len(payload)


def _stretches(file: InputFile, columns: Collection[str], most: int) -> list[FileStretch]:
    try:
        return FORMATS[file.format].stretches(file.path, columns, most)
    except _DAMAGE as error:
        raise BadDataError(
            f"{file.path} cannot be read: {_one_line(error)}. "
            "The file is damaged or incomplete: write it again."
        ) from error


def digested(file: InputFile) -> Digested:
    """Reads a file once, for its digest."""
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
    """Refuses a file that was replaced or written to since, without reading it again."""
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
    file: InputFile, columns: Collection[str], limit: Limit, stretch: FileStretch
) -> Iterator[Payload]:
    row = 0
    try:
        for payload in FORMATS[file.format].payloads(file.path, columns, limit, stretch):
            yield payload
            row += len(payload)
    except _DAMAGE as error:
        behind = f" of its part from {stretch.start:,} on" if stretch.start else ""
        raise BadDataError(
            f"{file.path} cannot be read after row {row:,}{behind}: {_one_line(error)}. "
            "The file is damaged or incomplete: write it again."
        ) from error


def _data_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"{path}: no such file or folder. Check the path.")
    if (path / "dataset_dict.json").is_file():
        return _only_split(path)
    if (path / "state.json").is_file():
        return _saved_dataset(path)
    return _folder(path)


def _only_split(path: Path) -> list[Path]:
    splits = _json_list(path / "dataset_dict.json", "splits")
    if len(splits) != 1:
        raise UsageError(
            f"{path} holds the splits {', '.join(splits)}. Name one of them, for example "
            f"{path / ('train' if 'train' in splits else [*splits, 'SPLIT'][0])}."
        )
    return _data_files(path / splits[0])


def _saved_dataset(path: Path) -> list[Path]:
    names = _json_list(path / "state.json", "_data_files")
    missing = [name for name in names if not (path / name).is_file()]
    if missing or not names:
        what = f"lacks {', '.join(missing)}, which its state.json names" if missing else "is empty"
        raise UsageError(f"{path} {what}. Save the data set again.")
    _require_all_parts(path, names)
    return [path / name for name in names]


def _require_all_parts(folder: Path, names: Collection[str]) -> None:
    """Refuses a folder that lacks files which the names of others count."""
    found: dict[tuple[str, str], set[int]] = {}
    for part in filter(None, map(_PART.match, names)):
        found.setdefault((part["set"], part["count"]), set()).add(int(part["number"]))
    for (name, count), numbers in found.items():
        if missing := sorted({*range(int(count))} - numbers):
            raise UsageError(
                f"{folder} lacks {len(missing):,} of the {int(count):,} files of {name!r}, "
                f"{name}-{missing[0]:05d}-of-{count} first. Get them too, or name the files that "
                "are the data."
            )


def _json_list(path: Path, key: str) -> list[str]:
    try:
        entries = json.loads(path.read_bytes())[key]
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in entries]
        if all(map(is_plain_name, names)):
            return names
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    raise UsageError(f"{path} does not list {key!r} as `datasets` writes it. Save it again.")


def _folder(path: Path) -> list[Path]:
    files = sorted(
        entry
        for entry in path.iterdir()
        if entry.is_file() and entry.suffix.lower() in FORMATS and _is_data(entry.name)
    )
    if not files:
        raise UsageError(f"{path} holds no data files ({_endings()}). Name the files or a folder.")
    other = next((file for file in files if file.suffix != files[0].suffix), None)
    if other:
        raise UsageError(
            f"{path} holds files of two kinds, {files[0].name} and {other.name}. "
            "Name the files that are the data."
        )
    _require_all_parts(path, [file.name for file in files])
    return files


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_")) and name not in _SIDECARS


def _opened(path: Path) -> InputFile:
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path} has an ending that is not known. Known are {_endings()}.")
    file = InputFile(path, path.suffix.lower(), path.stat().st_size)
    if not file.bytes:
        raise UsageError(f"{path} is empty (0 bytes). Leave it out or write it again.")
    if _first_two_bytes(path) in {codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE}:
        raise UsageError(f"{path} is UTF-16 text. Save it as UTF-8.")
    if not column_names(file):
        raise UsageError(f"{path} has no rows. Leave it out or write it again.")
    return file


def _first_two_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(2)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}. Check its rights.") from error


def _endings() -> str:
    return ", ".join(FORMATS)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:500]
