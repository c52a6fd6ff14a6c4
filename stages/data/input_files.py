"""Data files and folders as streams of chunks and slices, never loaded whole."""

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
from .file_formats import FORMATS, WHOLE, FileRange, Limit, Payload, json_columns
from .json_files import keys_among

_DAMAGE = (BadDataError, pa.ArrowException, OSError, UnicodeError)
# The names that `datasets` and the Hugging Face Hub give to the files of one data set.
_PART = re.compile(r"(?P<set>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_SIDECARS = {"dataset_info.json", "dataset_infos.json"}  # of `datasets`, beside the data


@dataclass(frozen=True)
class InputFile:
    """One file of preference data."""

    path: Path
    format: str  # its suffix, a key of FORMATS
    bytes: int


@dataclass(frozen=True)
class Digested:
    """The digest of a data file, and its version at that time."""

    bytes: int
    sha256: str
    version: tuple[int, int]  # inode and modification time, which change if a file is replaced


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file, not yet parsed; cheap to send to another process.

    Rows are counted from 0 within their file, or within a range of it. Blank lines of JSONL and
    CSV and the CSV header are not rows and are not counted.
    """

    file: int  # index of the input; parsed records have the file's identity instead
    row: int  # of its first row
    payload: Payload

    def __len__(self) -> int:
        return len(self.payload)


def open_inputs(files: Sequence[str]) -> tuple[InputFile, ...]:
    """The data files in these files and folders, each checked to have rows."""
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
    """Refuses a folder that lacks files of a numbered set."""
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
