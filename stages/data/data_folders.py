"""The data files in a folder: of one split, none of them missing, or it is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from ...schemas.errors import UsageError
from ...schemas.plain_names import is_plain_name
from .file_formats import FORMATS, ending_of
from .packed_files import PACKED

Split: TypeAlias = Literal["train", "validation", "test"]

_SPLITS: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
}
ORDER = tuple(dict.fromkeys(_SPLITS.values()))
_PLAIN = ", ".join(ending for ending in FORMATS if not ending.endswith(PACKED))
ENDINGS = f"{_PLAIN}, and those of text with {' or '.join(PACKED)} behind them"
_WORD = re.compile("[A-Za-z]+")
# The names that `datasets` and the Hugging Face Hub give to the files of one data set.
_PART = re.compile(r"(?P<set>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_SIDECARS = {"dataset_info.json", "dataset_infos.json"}  # of `datasets`, beside the data
HUB_FOLDER = "data"  # the one that the Hub's data sets have their files in


def data_files(path: Path, split: str = "") -> list[Path]:
    """The file, or the data files of a folder; `split` names the one to read where it has some."""
    if path.is_file() and not split:
        return [path]
    if path.is_file():
        raise UsageError(f"{path} is one file, of which no split can be taken: leave --split out.")
    if not path.is_dir():
        raise UsageError(f"{path}: no such file or folder. Check the path.")
    if (path / "dataset_dict.json").is_file():
        return _of_saved_splits(path, split)
    if (path / "state.json").is_file():
        require_split(path, [], split)
        return _saved_dataset(path)
    return _folder(path, split)


def split_in(name: str) -> tuple[re.Match[str], Split] | None:
    """The first word of a name that names a split, and the split."""
    words = ((word, _SPLITS.get(word.group().lower())) for word in _WORD.finditer(name))
    return next(((word, split) for word, split in words if split), None)


def _of_saved_splits(path: Path, split: str) -> list[Path]:
    splits = _json_list(path / "dataset_dict.json", "splits")
    if split:
        require_split(path, splits, split)
        splits = [split]
    if len(splits) != 1:
        raise UsageError(
            f"{path} holds the splits {', '.join(splits)}. Name one of them, for example "
            f"{path / ('train' if 'train' in splits else [*splits, 'SPLIT'][0])}, or take it "
            "with --split."
        )
    return data_files(path / splits[0])


def require_split(path: Path, splits: Collection[str], split: str) -> None:
    """Refuses the name of a split that is not there."""
    if split and split not in splits:
        there = f"the splits {', '.join(splits)}" if splits else "no splits"
        raise UsageError(f"--split {split}: {path} holds {there}. Change --split or leave it out.")


def _saved_dataset(path: Path) -> list[Path]:
    names = _json_list(path / "state.json", "_data_files")
    missing = [name for name in names if not (path / name).is_file()]
    if missing or not names:
        what = f"lacks {', '.join(missing)}, which its state.json names" if missing else "is empty"
        raise UsageError(f"{path} {what}. Save the data set again.")
    _require_all_parts(path, names)
    return [path / name for name in names]


def _require_all_parts(folder: Path, names: Iterable[str]) -> None:
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


def _folder(path: Path, split: str) -> list[Path]:
    files = files_in(path)
    if not files:
        below = _below(path, split)
        return data_files(below, "" if below.name == split else split)
    files = _of_one_split(path, files, split)
    other = next((one for one in files if ending_of(one.name) != ending_of(files[0].name)), None)
    if other:
        raise UsageError(
            f"{path} holds files of two kinds, {files[0].name} and {other.name}. "
            "Name the files that are the data."
        )
    _require_all_parts(path, [file.name for file in files])
    return files


def files_in(path: Path) -> list[Path]:
    """The data files that lie in a folder itself."""
    return sorted(
        entry
        for entry in path.iterdir()
        if entry.is_file() and ending_of(entry.name) and _is_data(entry.name)
    )


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_")) and name not in _SIDECARS


def _below(path: Path, split: str) -> Path:
    """The folder in a folder without data files of its own that has them."""
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and _is_data(entry.name))
    with_data = [folder.name for folder in folders if files_in(folder)]
    wanted = split if split in with_data else HUB_FOLDER
    if wanted in with_data:
        return path / wanted
    if with_data:
        raise UsageError(
            f"{path} holds no data files itself but folders of them: {', '.join(with_data)}. "
            f"Name one, for example {path / with_data[0]}."
        )
    raise UsageError(f"{path} holds no data files ({ENDINGS}). Name the files or a folder.")


def _of_one_split(path: Path, files: Sequence[Path], split: str) -> list[Path]:
    """Those of the split; refuses several of a hub's data set where none is named."""
    of_set = {file: _set_of(file.name) for file in files}
    sets = tuple(dict.fromkeys(of_set.values()))
    if split:
        require_split(path, sets, split)
        return [file for file in files if of_set[file] == split]
    numbered = {of_set[file] for file in files if _PART.match(file.name)}
    if len(numbered) > 1 and any(map(split_in, numbered)):
        example = "train" if "train" in sets else sets[0]
        raise UsageError(
            f"{path} holds the splits {', '.join(sets)}. Take one of them, for example with "
            f"--split {example}."
        )
    return [*files]


def _set_of(name: str) -> str:
    """The split that a file is a part of, by its name."""
    part = _PART.match(name)
    return part["set"] if part else name[: -len(ending_of(name))]
