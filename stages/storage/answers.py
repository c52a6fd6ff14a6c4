"""Answers of models and judges: a folder with one file of JSON lines per writer.

A line holds a key, its answer and a checksum. `add` appends lines and returns once they are
durable. Processes of many machines write at the same time, each to a file of its own, so no lock is
needed. A reader continues in each file where it stopped. An incomplete last line belongs to a
writer that was killed or is still writing, and is ignored until it is complete.

If two answers have one key, the smaller line counts, so every process reads the same answer. A
refusal is stored too, for other processes; an answer replaces it.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ...schemas.errors import damaged, os_errors_as_storage_errors
from ...schemas.json_codec import to_json
from .disk import fs
from .disk.lines import read_lines

Answer: TypeAlias = "Mapping[str, Any]"
Place: TypeAlias = tuple[Path, int, int]  # the file of a line, its start and its size

NAMES = "answers-*.jsonl"
SUM = len(b',"sum":"00000000"}\n')
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class Answers:
    """The answers in a folder, as far as this process has read them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, Place] = {}  # answers stay on the disk
        self._refusals: dict[str, str] = {}
        self._ends: dict[Path, int] = {}  # the end of the last line that was read from each file
        self._own = self._new_file()
        self.look()

    def look(self) -> None:
        """Reads the lines that other processes have added."""
        with os_errors_as_storage_errors("read", self.folder):
            found = [*self.folder.iterdir()] if self.folder.is_dir() else []
        for path in sorted(path for path in found if path.match(NAMES)):
            self._read(path)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys without an answer, in their order."""
        return [key for key in keys if key not in self._places]

    def refused(self, keys: Iterable[str]) -> dict[str, str]:
        """The reason of each key whose question was refused and has no answer."""
        return {key: self._refusals[key] for key in self.missing(keys) if key in self._refusals}

    def of(self, keys: Iterable[str]) -> Iterator[tuple[str, Answer]]:
        """The stored answers of these keys, file by file."""
        wanted: dict[Path, list[tuple[Place, str]]] = {}
        for key in keys:
            if place := self._places.get(key):
                wanted.setdefault(place[0], []).append((place, key))
        for path in sorted(wanted):
            with fs.open_file(path) as source:
                for (_, start, size), key in sorted(wanted[path]):
                    source.seek(start)
                    yield key, _parsed(path, source.read(size))["answer"]

    def add(self, answers: Mapping[str, Answer], refused: Mapping[str, str] | None = None) -> None:
        """Stores answers and the reasons of refusals, durably."""
        lines = [_line({"key": key, "answer": dict(one)}) for key, one in answers.items()]
        lines += [_line({"key": key, "refused": why}) for key, why in (refused or {}).items()]
        if not lines:
            return
        # A failed write may leave half a line: no line may follow it in the same file.
        path, self._own = self._own, self._new_file()
        payload = b"".join(lines)
        with os_errors_as_storage_errors("write", path, len(payload)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, _APPEND, 0o600), "ab") as sink:
                is_new = sink.tell() == 0
                sink.write(payload)
                sink.flush()
                os.fsync(sink.fileno())
        if is_new:
            fs.fsync(self.folder)
            fs.fsync(self.folder.parent)
            self._ends[path] = 0  # also if the file was removed
        self._own = path
        self._read(path)

    def _new_file(self) -> Path:
        return self.folder / NAMES.replace("*", secrets.token_hex(8))

    def _read(self, path: Path) -> None:
        """Reads the complete lines that were added to a file since it was last read."""
        for line, end in read_lines(path, self._ends.get(path, 0)):
            record = _parsed(path, line)
            self._ends[path] = end
            key = record["key"]
            if why := record.get("refused"):
                self._refusals[key] = why  # the latest, after whatever was changed since
                continue
            if known := self._places.get(key):
                with fs.open_file(known[0]) as source:
                    source.seek(known[1])
                    if source.read(known[2]) <= line:
                        continue
            self._places[key] = path, end - len(line), len(line)


def _line(record: Mapping[str, Any]) -> bytes:
    body = to_json(record).encode()[: -len("}\n")]
    return body + _sum_of(body)


def _sum_of(body: bytes) -> bytes:
    return b',"sum":"%08x"}\n' % zlib.crc32(body)


def _parsed(path: Path, line: bytes) -> dict[str, Any]:
    if line[-SUM:] != _sum_of(line[:-SUM]):
        raise damaged(
            path,
            "one of its lines was altered",
            "Remove that line, then run the same command again: its answer is requested again.",
        )
    record: dict[str, Any] = json.loads(line)
    return record
