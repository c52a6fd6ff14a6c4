"""Answers that were paid for: a folder of segments, each durable once `add` has returned.

A segment is a file of JSON lines, `{"key": …, "answer": …}`, named by the digest of its bytes. They
are compared with it when a process first reads them; an answer is then read by its place. Of two
answers with one key the one counts whose line is the smaller, whoever was first. A refusal is kept
too, under a key of its own, so that other processes know it; an answer that comes after all
replaces it.

Processes of many machines add, read and merge at the same time, and no lock holds them apart:

- To add is to put one new segment. No other is read or written for it.
- To merge, which is done before more is asked for and before a table is published, is to put large
  segments of the lines of small ones, and then to remove these. A large segment is never merged or
  removed. So whoever finds a small one gone knows that its lines are in large ones, and were before
  it went; those who merge the same at once at worst both put them; and one that is killed midway
  leaves small ones whose lines are elsewhere too, which the next who merges removes.
- A listing that takes its time may come too early for a large segment and too late for the small
  ones. It was there when that listing ended, so the next has it: everybody lists twice, and again
  as long as answers, or segments that were listed, have gone.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ...schemas.errors import CorruptionError, PathError, damaged
from ...schemas.json_codec import digest, to_json
from .disk.disk_store import DiskStore

Answer: TypeAlias = "Mapping[str, Any]"

NAME = re.compile(r"[0-9a-f]{64}\.jsonl")
MOST_SMALL = 256  # segments; fewer are left as they are
SMALL_BYTES = 256 << 10  # of what is not large; the same for all who share a folder
MERGED_BYTES = 4 << 20  # of small segments, for one large
TRIES = 100  # of a look while others merge
PAUSE = 0.002  # seconds after the second of them; more after each


@dataclass(frozen=True, slots=True)
class _Span:
    """The place of a line."""

    segment: str
    start: int
    size: int
    mark: int  # a hash of the line: equal ones need not be read again


class Answers:
    """The answers in a folder; keeps their keys in memory, and the answers on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._store = DiskStore()
        self._spans: dict[str, _Span] = {}
        self._read: dict[str, int] = {}  # bytes of each segment
        self._is_made = False  # the folder
        self.look()

    def __contains__(self, key: str) -> bool:
        return key in self._spans

    def __len__(self) -> int:
        return len(self._spans)

    def look(self) -> None:
        """Reads the segments that other processes have added or merged."""
        for tried in range(TRIES):
            has_read_all = self._has_read_all()
            if tried and has_read_all:
                return
            time.sleep(PAUSE * tried)
        raise CorruptionError(
            f"{self.folder}: segments come and go faster than they can be read. See that only "
            "align writes there, then run the same command again."
        )

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys without an answer, in their order."""
        return [key for key in keys if key not in self._spans]

    def refused(self, keys: Iterable[str]) -> dict[str, str]:
        """Why there is no answer, for those of these keys whose question was refused."""
        names = {_of_refusal(key): key for key in self.missing(keys)}
        return {names[name]: answer["refused"] for name, answer in self.of(names)}

    def of(self, keys: Iterable[str]) -> Iterator[tuple[str, Answer]]:
        """The answers of these keys that are there, segment by segment."""
        spans: dict[str, dict[str, _Span]] = defaultdict(dict)
        for key in keys:
            if key in self._spans:
                spans[self._spans[key].segment][key] = self._spans[key]
        left: list[str] = []
        for name, payload in self._segments(sorted(spans)):
            if payload is None:
                left += spans[name]
            else:
                for key, span in spans[name].items():
                    line = payload[span.start : span.start + span.size]
                    yield key, json.loads(line)["answer"]
        if left:
            self.look()
            if self.missing(left):
                raise CorruptionError(
                    f"{self.folder}: answers that were there are gone. Run the same command again: "
                    "they are asked for again."
                )
            yield from self.of(left)

    def add(self, answers: Mapping[str, Answer], refused: Mapping[str, str] | None = None) -> None:
        """Makes them durable, and why others were refused, as one segment."""
        refusals = {_of_refusal(key): {"refused": why} for key, why in (refused or {}).items()}
        if every := {**answers, **refusals}:
            lines = [to_json({"key": key, "answer": dict(one)}) for key, one in every.items()]
            self._put([line.encode() for line in lines])

    def merge(self) -> None:
        """Removes what killed writers left, and makes large segments of many small ones."""
        small = sorted(name for name in self._read if not self._is_large(name))
        self._store.drop_drafts(self.folder)
        if len(small) <= MOST_SMALL:
            return
        least: dict[str, bytes] = {}  # the smallest line of each key
        size = 0
        merged: list[str] = []  # segments whose lines these are
        spent: list[str] = []  # whose lines are all in large ones
        relied_on: set[str] = set()  # these large ones
        for name, payload in self._segments(small):
            if payload is not None:  # else another process has merged it
                lines = self._in_no_large(payload, relied_on)
                (merged if lines else spent).append(name)
                for key, line in lines:
                    before = least.get(key, b"")
                    if not before or line < before:
                        least[key] = line
                        size += len(line) - len(before)
            if size >= (SMALL_BYTES if name == small[-1] else MERGED_BYTES):
                relied_on.add(self._put([*least.values()]))
                spent += merged
                least, size, merged = {}, 0, []
        if spent:
            self._remove(spent, relied_on)

    def _remove(self, spent: Sequence[str], relied_on: Iterable[str]) -> None:
        """Removes segments, once those that hold their lines are seen to be whole."""
        # Of one that another process has put, the name may not be durable yet.
        self._store.sync_names(self.folder)
        for name, payload in self._segments(sorted(relied_on)):
            if payload is None:
                raise _damaged(self.folder / name)
        for name in spent:
            del self._read[name]
            self._store.remove(self.folder / name)

    def _in_no_large(self, payload: bytes, relied_on: set[str]) -> list[tuple[str, bytes]]:
        """The lines of a small segment, by their keys, but those that count in large ones.

        Those of other small ones go along: another process may know them as the ones that count.
        The large ones are added to `relied_on`.
        """
        found = []
        for line in payload.splitlines(keepends=True):
            key = json.loads(line)["key"]
            if key in self and self._is_large(self._spans[key].segment):
                relied_on.add(self._spans[key].segment)
            else:
                found.append((key, line))
        return found

    def _put(self, lines: list[bytes]) -> str:
        payload = b"".join(sorted(lines))  # segments of the same answers are one
        name = f"{hashlib.sha256(payload).hexdigest()}.jsonl"
        # Also where there is one: who made it may have died before its name was durable.
        if not self._is_made or not self.folder.is_dir():
            self._store.make_folder(self.folder)
            self._is_made = True
        self._store.put_if_absent(self.folder / name, payload, label="answers")
        self._index(name, payload)
        return name

    def _has_read_all(self) -> bool:
        """Whether no answer has gone with what was merged before it could be read."""
        found = self._store.listed(self.folder) if self.folder.is_dir() else []
        names = {path.name for path in found if NAME.fullmatch(path.name)}
        gone = self._read.keys() - names
        lost = [key for key, span in self._spans.items() if span.segment in gone] if gone else []
        for name in gone:
            del self._read[name]
        for key in lost:
            del self._spans[key]
        has_read_all = not lost
        for name, payload in self._segments(sorted(names - self._read.keys())):
            has_read_all &= payload is not None and self._index(name, payload)
        return has_read_all

    def _index(self, name: str, payload: bytes) -> bool:
        """Whether each line could be compared with the one that counted before."""
        self._read[name] = len(payload)
        start, has_compared = 0, True
        for line in payload.splitlines(keepends=True):
            key = json.loads(line)["key"]
            span, known = _Span(name, start, len(line), hash(line)), self._spans.get(key)
            start += len(line)
            if known is None:
                self._spans[key] = span
            elif known.mark == span.mark:  # of equal lines the one that stays
                self._spans[key] = span if self._is_large(name) else known
            else:
                before = self._bytes(known.segment, known)
                has_compared &= before is not None
                self._spans[key] = span if before is None or line < before else known
        return has_compared

    def _is_large(self, name: str) -> bool:
        return self._read[name] >= SMALL_BYTES

    def _segments(self, names: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        """The bytes of segments, compared with their names."""
        return ((name, self._whole(name)) for name in names)

    def _whole(self, name: str) -> bytes | None:
        payload = self._bytes(name)
        if payload is not None and f"{hashlib.sha256(payload).hexdigest()}.jsonl" != name:
            raise _damaged(self.folder / name)
        return payload

    def _bytes(self, segment: str, span: _Span | None = None) -> bytes | None:
        """Those of a segment or of a line; None once another process has merged it."""
        path = self.folder / segment
        try:
            if span:
                return self._store.read_part(path, span.start, span.size)
            return self._store.read(path)
        except PathError:
            if path.is_file():
                raise
            return None


def _damaged(path: Path) -> CorruptionError:
    return damaged(
        path,
        "its bytes are not those that it is named by",
        "Remove it, and run the same command again: the answers in it are asked for again.",
    )


def _of_refusal(key: str) -> str:
    return digest(["refused", key])
