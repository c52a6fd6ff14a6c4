"""Data files: found in folders, opened, cut into slices, read and digested."""

from __future__ import annotations

import codecs
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ...schemas.data_options import DataOptions
from ...schemas.errors import BadDataError, FingerprintError, UsageError
from ...schemas.file_version import FileVersion
from ...schemas.rows import BadRow
from ..storage.disk.digests import own_digests, remembered_sha256
from ..storage.locations import origin_of
from .readers import ENDINGS, READERS, WHOLE_FILE, FilePart, Row, ending_of, open_bytes
from .subsets import Subset, matching, subsets_of

_DAMAGE = (BadDataError, pa.ArrowException, OSError, UnicodeError)
HUB_FOLDER = "data"  # the folder of files in data sets of the Hub
# The file names of one data set, as `datasets` and the Hugging Face Hub write them.
_NUMBERED = re.compile(r"(?P<set>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_SIDECARS = {"dataset_info.json", "dataset_infos.json"}  # of `datasets`, beside the data
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    "test": "test",
}
_WORD = re.compile("[A-Za-z]+")


@dataclass(frozen=True)
class InputFile:
    """One file of preference data."""

    path: Path
    format: str  # the ending of its name, a key of READERS
    bytes: int
    columns: tuple[str, ...] = ()  # of a JSON file, the keys of its first rows


def inputs_of(data: DataOptions) -> tuple[InputFile, ...]:
    """The data files that the settings name, all of one split."""
    inputs = open_inputs(data.files, data.split)
    require_one_split(inputs)
    return inputs


def open_inputs(files: Sequence[str], split: str = "") -> tuple[InputFile, ...]:
    """The data files in these files and folders, each checked to have rows.

    `split` names the split to read from folders with several.
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


def _opened(path: Path) -> InputFile:
    ending = ending_of(path.name)
    if not ending:
        raise UsageError(f"{path} has an unknown ending. Use one of {ENDINGS}.")
    size = path.stat().st_size
    try:
        with open_bytes(path) as source:
            if source.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise UsageError(f"{path} is UTF-16 text. Save it as UTF-8.")
        columns = READERS[ending].columns(path) if size else ()
    except _DAMAGE as error:
        raise UsageError(
            f"{path} cannot be read as {ending[1:]}: {_one_line(error)}. "
            "Check that the file is complete, or write it again."
        ) from error
    if not columns:
        raise UsageError(f"{path} has no rows. Leave it out or write it again.")
    return InputFile(path, ending, size, columns)


# Folders


def data_files(path: Path, split: str) -> list[Path]:
    """The file, or the data files of a folder or of a subset; `split` names the split to read."""
    own, above = subsets_of(path), subsets_of(path.parent)
    if own:
        name = next(iter(own)) if len(own) == 1 else "default"
        if name not in own:
            names, first = ", ".join(own), next(iter(own))
            raise UsageError(f"{path} holds the subsets {names}. Choose one: {path}/{first}")
        return _of_subset(path, name, own[name], split)
    if path.name in above:
        return _of_subset(path.parent, path.name, above[path.name], split)
    if above and not path.exists():
        raise UsageError(f"{path}: no such subset. There are {', '.join(above)}.")
    return _of_folder(path, split)


def _of_folder(path: Path, split: str) -> list[Path]:
    """The file, or the data files of a folder without named subsets."""
    if path.is_file():
        if split:
            raise UsageError(f"--split {split}: {path} is one file. Leave --split out.")
        return [path]
    if not path.is_dir():
        raise UsageError(f"{path}: no such file or folder. Check the path.")
    if (path / "dataset_dict.json").is_file():
        splits = _names_in(path / "dataset_dict.json", "splits")
        one = splits[0] if len(splits) == 1 and not split else _chosen(path, splits, split)
        return _of_folder(path / one, "")
    if (path / "state.json").is_file():
        return _saved_files(path, split)
    if files := _files_in(path):
        return _of_one_set(path, files, split)
    folders = [one.name for one in sorted(path.iterdir()) if one.is_dir() and _files_in(one)]
    if split in folders:
        return _of_folder(path / split, "")
    if HUB_FOLDER in folders:
        return _of_folder(path / HUB_FOLDER, split)
    found = f"but these folders do: {', '.join(folders)}" if folders else f"({ENDINGS})"
    raise UsageError(f"{path} holds no data files {found}. Name the files or their folder.")


def _of_subset(path: Path, name: str, subset: Subset, split: str) -> list[Path]:
    """The files of a subset that a README.md names, or those of its split."""
    chosen = next(iter(subset)) if len(subset) == 1 and not split else split
    if chosen not in subset:
        chosen = _chosen(path, [*subset], split)
    files = [one for one in matching(path, subset[chosen]) if ending_of(one.name)]
    if not files:
        raise UsageError(
            f"{path} holds no data files ({ENDINGS}) of {name}, {chosen}, which its README.md "
            "names. Name the files or their folder."
        )
    _require_all_numbered(path, [one.name for one in files])
    return files


def _saved_files(path: Path, split: str) -> list[Path]:
    """The files of a folder that `datasets` saved, in the order of its state.json."""
    if split:
        raise UsageError(f"--split {split}: {path} holds no splits. Leave --split out.")
    names = _names_in(path / "state.json", "_data_files")
    if missing := [name for name in names if not (path / name).is_file()]:
        raise UsageError(f"{path} lacks {', '.join(missing)}, which its state.json names.")
    _require_all_numbered(path, names)
    return [path / name for name in names]


def _files_in(path: Path) -> list[Path]:
    """The data files directly in a folder."""
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    return [
        path / name
        for name in names
        if ending_of(name) and name[0] not in "._" and name not in _SIDECARS
    ]


def _of_one_set(path: Path, files: list[Path], split: str) -> list[Path]:
    """The files of a folder, or those of the split; refuses several splits, and missing files."""
    numbered = {file: _NUMBERED.match(file.name) for file in files}
    set_of = {
        file: match["set"] if match else file.name.removesuffix(ending_of(file.name))
        for file, match in numbered.items()
    }
    sets = {set_of[file] for file in files if numbered[file]}
    if split or (len(sets) > 1 and any(map(_split_in, sets))):
        chosen = _chosen(path, [*dict.fromkeys(set_of.values())], split)
        files = [file for file in files if set_of[file] == chosen]
    first, *others = files
    if other := next((one for one in others if ending_of(one.name) != ending_of(first.name)), None):
        raise UsageError(
            f"{path} holds files of two kinds, {first.name} and {other.name}. Name the data files."
        )
    _require_all_numbered(path, [file.name for file in files])
    return files


def _chosen(path: Path, splits: Sequence[str], split: str) -> str:
    """The split to read, from several."""
    if split in splits:
        return split
    asked = f"--split {split}: " if split else ""
    example = "train" if "train" in splits else splits[0]
    raise UsageError(
        f"{asked}{path} holds the splits {', '.join(splits)}. Choose one, for example with "
        f"--split {example}."
    )


def _names_in(path: Path, key: str) -> list[str]:
    """The names that a JSON file of `datasets` lists."""
    try:
        entries = json.loads(path.read_bytes())[key]
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in entries]
    except (OSError, ValueError, LookupError, TypeError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{path} does not list {key!r} as `datasets` writes it. Save it again.")
    return names


def _require_all_numbered(folder: Path, names: Iterable[str]) -> None:
    """Refuses a folder that lacks files of a numbered set."""
    found: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for one in filter(None, map(_NUMBERED.match, names)):
        found[one["set"], one["count"]].add(int(one["number"]))
    for (name, count), numbers in found.items():
        if missing := sorted({*range(int(count))} - numbers):
            raise UsageError(
                f"{folder} lacks {len(missing):,} of the {int(count):,} files of {name!r}, "
                f"{name}-{missing[0]:05d}-of-{count} first. Add them, or name the data files."
            )


def _split_in(name: str) -> tuple[re.Match[str], str] | None:
    """The first word in a name that means a split, and the split."""
    words = ((word, _SPLITS.get(word.group().lower())) for word in _WORD.finditer(name))
    return next(((word, split) for word, split in words if split), None)


def require_one_split(inputs: Sequence[InputFile]) -> None:
    """Refuses files of several splits of one data set, which would train on held-out rows."""
    sets: defaultdict[str, dict[str, str]] = defaultdict(dict)  # split: a file of it
    for file in inputs:
        path = origin_of(str(file.path))  # which the user gave
        folder, _, name = path.rpartition("/")
        above, _, own = folder.rpartition("/")
        # Files whose paths agree up to the split's name belong to one data set.
        if found := _split_in(name.rpartition(".")[0]):
            word, split = found
            sets[f"{folder}/{name[: word.start()]}"].setdefault(split, path)
        if found := _split_in(own):
            word, split = found
            sets[f"{above}/{own[: word.start()]}*/"].setdefault(split, path)
    for splits in sets.values():
        if len(splits) > 1:
            files = ", ".join(f"{path} ({split})" for split, path in splits.items())
            raise UsageError(
                f"These are several splits of one data set: {files}. Give a command one split: "
                "choose it with --split, or name its files."
            )


# Slices and rows

SLICES = 64  # of small data; LARGEST_SLICE decides for large data
LEAST_SLICE, LARGEST_SLICE = 2 << 20, 32 << 20


def slices_of(inputs: Sequence[InputFile], columns: Collection[str]) -> list[list[FilePart]]:
    """The data in order, cut into slices: a part of a file each, or several small files.

    The cuts depend on the files alone; the sizes count these columns.
    """
    files = [_parts_in(number, file, columns) for number, file in enumerate(inputs)]
    total = sum(one.bytes for parts in files for one in parts)
    most = min(max(total // SLICES, LEAST_SLICE), LARGEST_SLICE)
    tasks: list[list[FilePart]] = []
    room = 0  # bytes left for more files in the last slice
    for parts in files:
        joined = parts[:1]
        for one in parts[1:]:
            last = joined[-1]
            if last.bytes + one.bytes <= most:
                size = last.bytes + one.bytes
                joined[-1] = last._replace(stop=one.stop, bytes=size)
            else:
                joined.append(one)
        first, is_whole = joined[0], len(joined) == 1
        if is_whole and tasks and first.bytes <= room:
            tasks[-1].append(first)
            room -= first.bytes
        else:
            tasks += [[one] for one in joined]
            room = most - first.bytes if is_whole else 0
    return tasks


def _parts_in(number: int, file: InputFile, columns: Collection[str]) -> list[FilePart]:
    try:
        found = READERS[file.format].parts(file.path, columns, LEAST_SLICE)
    except _DAMAGE as error:
        raise _damaged(file, "", error) from error
    return [one._replace(file=number) for one in found]


def rows_of(
    file: InputFile, columns: Collection[str], part: FilePart = WHOLE_FILE
) -> Iterator[Row | BadRow]:
    """The rows of a file or of a part of it, with at least these columns."""
    row = 0
    try:
        for cells in READERS[file.format].rows(file.path, columns, part):
            yield cells
            row += 1
    except _DAMAGE as error:
        where = f" of its part from {part.start:,} on" if part.start else ""
        raise _damaged(file, f" after row {row:,}{where}", error) from error


def _damaged(file: InputFile, where: str, error: Exception) -> BadDataError:
    return BadDataError(
        f"{file.path} cannot be read{where}: {_one_line(error)}. "
        "The file is damaged or incomplete: write it again."
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:500]


# Digests


@dataclass(frozen=True)
class Digested:
    """The digest of a data file, and the file's version at that time."""

    bytes: int
    sha256: str
    version: FileVersion


def digested(file: InputFile) -> Digested:
    """The digest of a file; the file is read only if no digest of this version is cached."""
    version = FileVersion.of(file.path)
    return Digested(version.size, remembered_sha256(file.path, own_digests()), version)


def require_unchanged(inputs: Sequence[InputFile], before: Sequence[Digested]) -> None:
    """Refuses files that were replaced or modified since they were digested."""
    for file, known in zip(inputs, before, strict=True):
        if not FileVersion.of(file.path).is_content_of(known.version):
            raise FingerprintError(
                f"{file.path} changed while it was read. Wait until no program writes to it, then "
                "run the same command again."
            )
