"""Answers that were paid for: a folder of segments, each durable once `add` has returned.

A segment is a file of JSON lines, `{"key": …, "answer": …}`, named by the digest of its bytes. Any
number of processes may add to one folder. An answer that two of them received is kept once, the
one whose line is the smaller, whoever was first. Segments are merged when there are many.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...schemas.errors import CorruptionError
from ...schemas.json_codec import to_json
from . import places
from .objects import Location

Answer: TypeAlias = "Mapping[str, Any]"

SUFFIX = ".jsonl"
MOST_SEGMENTS = 256  # more are merged when the folder is opened to write
KEPT_SEGMENTS = 8  # in memory, to read answers from


@dataclass(frozen=True)
class _Place:
    """Where a line is, and a digest by which equal keys are ordered."""

    segment: str
    start: int
    size: int


class Answers:
    """The answers in a folder; keeps their keys in memory, and the answers on the disk."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self._places: dict[str, _Place] = {}
        self._read: set[str] = set()
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self.look()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def look(self) -> None:
        """Reads the segments that other processes have added."""
        names = [path.name for path in places.listed(self.folder)] if self.folder.is_dir() else []
        for name in names:
            if name.endswith(SUFFIX) and name not in self._read:
                self._index(name, self._content(name))

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Those that have no answer yet, in their order."""
        return [key for key in keys if key not in self._places]

    def get(self, key: str) -> Answer:
        """The answer of a key that is there."""
        place = self._places[key]
        answer: Answer = json.loads(self._line(place))["answer"]
        return answer

    def of(self, keys: Collection[str]) -> Iterator[tuple[str, Answer]]:
        """The answers of these keys that are there, segment by segment."""
        found = [(self._places[key], key) for key in keys if key in self._places]
        for _, key in sorted(found, key=lambda one: (one[0].segment, one[0].start)):
            yield key, self.get(key)

    def add(self, answers: Mapping[str, Answer]) -> None:
        """Makes them durable, as one segment."""
        if not answers:
            return
        lines = [to_json({"key": key, "answer": dict(answer)}) for key, answer in answers.items()]
        payload = "".join(lines).encode()
        name = self._put(payload)
        self._index(name, payload)

    def merge(self) -> None:
        """Writes all segments as one, where there are many, and removes them."""
        if len(self._read) <= MOST_SEGMENTS:
            return
        before = sorted(self._read)
        order = sorted(self._places.items())
        merged = self._put(b"".join(self._line(place) for _, place in order))
        self._places, self._read = {}, set()
        self._index(merged, self._content(merged))
        for name in before:
            if name != merged:
                places.unlink(self.folder / name)

    def _put(self, payload: bytes) -> str:
        name = f"{hashlib.sha256(payload).hexdigest()}{SUFFIX}"
        places.make_folder(self.folder)
        places.put_if_absent(self.folder / name, payload, label="answers")
        return name

    def _index(self, name: str, payload: bytes) -> None:
        self._read.add(name)
        start = 0
        for line in payload.splitlines(keepends=True):
            key = json.loads(line)["key"]
            place = _Place(name, start, len(line))
            known = self._places.get(key)
            if known is None or line < self._line(known):
                self._places[key] = place
            start += len(line)

    def _line(self, place: _Place) -> bytes:
        return self._content(place.segment)[place.start : place.start + place.size]

    def _content(self, name: str) -> bytes:
        """A segment's bytes, checked against its name."""
        if name in self._contents:
            self._contents.move_to_end(name)
            return self._contents[name]
        path = self.folder / name
        payload = places.read_bytes(path)
        if f"{hashlib.sha256(payload).hexdigest()}{SUFFIX}" != name:
            raise CorruptionError(
                f"{path} is damaged: its bytes are not those that it is named by. Remove it, and "
                "run the same command again: the answers in it are asked for again."
            )
        self._contents[name] = payload
        while len(self._contents) > KEPT_SEGMENTS:
            self._contents.popitem(last=False)
        return payload
