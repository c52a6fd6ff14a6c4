"""Refusal of files of several splits of one data set, which would train on held-out rows."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...schemas.errors import UsageError
from ..storage.copies import origin_of
from .data_folders import ORDER, Split, split_in
from .input_files import InputFile


def require_one_split(inputs: Sequence[InputFile], command: str, output: str) -> None:
    """Refuses files that are several splits of one data set; `output` is where `command` writes."""
    sets: defaultdict[str, dict[Split, list[_Part]]] = defaultdict(dict)
    for file in inputs:
        for part in _parts(origin_of(str(file.path))):
            sets[part.of].setdefault(part.split, []).append(part)
    for splits in sets.values():
        if len(splits) > 1:
            raise UsageError(_several(splits, command, output))


@dataclass(frozen=True)
class _Part:
    """A file as a part of a data set."""

    of: str  # the path up to the word that names the split
    split: Split
    path: str
    pattern: str  # a shell pattern of all files of the split


def _parts(path: str) -> Iterator[_Part]:
    """The parts that the file's name and its folder's name give, if they name a split."""
    folder, slash, name = path.rpartition("/")
    stem, dot, ending = name.rpartition(".")
    if found := split_in(stem):
        word, split = found
        begun = shlex.quote(f"{folder}{slash}{stem[: word.end()]}")
        pattern = shlex.quote(path) if "://" in path else f"{begun}*{dot}{ending}"
        yield _Part(f"{folder}/{stem[: word.start()]}", split, path, pattern)
    above, _, own = folder.rpartition("/")
    if found := split_in(own):
        word, split = found
        yield _Part(f"{above}/{own[: word.start()]}*/", split, path, shlex.quote(folder))


def _several(splits: Mapping[Split, Sequence[_Part]], command: str, output: str) -> str:
    first, *others = sorted(splits, key=ORDER.index)
    commands = [f"align {command} {_named(splits[first])}"]
    commands += [
        f"align {command} {_named(splits[other])} --output {output}-{other}" for other in others
    ]
    files = ", ".join(f"{splits[split][0].path} ({split})" for split in (first, *others))
    lines = "\n  ".join(commands)
    return (
        f"These are several splits of one data set: {files}. Give each to a command of its own:\n"
        f"  {lines}\nIf they are meant as one set of data, link the files of one into another "
        "folder, and name that too."
    )


def _named(parts: Sequence[_Part]) -> str:
    if len(parts) == 1:
        return shlex.quote(parts[0].path)
    return " ".join(dict.fromkeys(part.pattern for part in parts))
