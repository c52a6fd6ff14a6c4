"""Answers that were paid for: a folder of segments, each durable once `add` has returned.

A segment is a file of JSON lines, `{"key": …, "answer": …}`, named by the digest of its bytes. Any
number of processes may add to one folder. An answer that two of them received is kept once, the
one whose line is the smaller, whoever was first. Many small segments are merged into larger ones;
a process that reads one of them meanwhile looks again.

A refusal is kept too, under a key of its own, so that other processes know it; an answer that comes
after all replaces it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ...schemas.errors import CorruptionError, PathError, counted
from ...schemas.json_codec import digest, to_json
from ...schemas.samples import is_token_count
from .bucket.objects import Location
from .store import store_of

logger = logging.getLogger("align")

Answer: TypeAlias = "Mapping[str, Any]"

NAME = re.compile(r"[0-9a-f]{64}\.jsonl")
MOST_SMALL = 256  # more of them are merged
SMALL_BYTES = 1 << 20
MERGED_BYTES = 16 << 20
KEPT_SEGMENTS = 4  # in memory, to read answers from
TRIES = 100  # of a look while others merge
PAUSE = 0.002  # seconds after the first of them; more after each
_COUNTS = ("prompt_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class _Span:
    """The segment of a line, and its bytes in it."""

    segment: str
    start: int
    size: int


class _GoneError(Exception):
    """Another process has merged a segment away."""


class Answers:
    """The answers in a folder; keeps their keys in memory, and the answers on the disk."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self._store = store_of(folder)
        self._spans: dict[str, _Span] = {}
        self._read: dict[str, int] = {}  # bytes of each segment
        self._unusable: set[str] = set()  # keys of answers that no table can hold
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self.look()
        # A listing may come too early for what is merged, and too late for what it is merged from.
        self.look()
        if unusable := self._unusable - self._spans.keys():
            logger.warning(
                "%s holds %s with a number of tokens that no text has: counted as missing, and "
                "asked for again.",
                folder,
                counted(len(unusable), "answers"),
            )

    def __contains__(self, key: str) -> bool:
        return key in self._spans

    def __len__(self) -> int:
        return len(self._spans)

    def look(self) -> None:
        """Reads the segments that other processes have added or merged."""
        for tried in range(TRIES):
            if self._has_seen_all():
                return
            time.sleep(PAUSE * random.uniform(0, tried))
        raise CorruptionError(
            f"{self.folder}: segments come and go faster than they can be read. See that only "
            "align writes there, then run the same command again."
        )

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys without an answer, in their order."""
        return [key for key in keys if key not in self._spans]

    def refused(self, keys: Iterable[str]) -> dict[str, str]:
        """Why there is no answer, for those of these keys whose question was refused."""
        left = ((key, _of_refusal(key)) for key in keys if key not in self._spans)
        return {key: self.get(name)["refused"] for key, name in left if name in self._spans}

    def get(self, key: str) -> Answer:
        """The answer of a key that is there."""
        while key in self._spans:
            try:
                answer: Answer = json.loads(self._line(self._spans[key]))["answer"]
            except _GoneError:
                self.look()
            else:
                return answer
        raise CorruptionError(
            f"{self.folder}: an answer that was there is gone. Run the same command again: it is "
            "asked for again."
        )

    def of(self, keys: Collection[str]) -> Iterator[tuple[str, Answer]]:
        """The answers of these keys that are there, segment by segment."""
        found = [(self._spans[key], key) for key in keys if key in self._spans]
        for _, key in sorted(found, key=lambda one: (one[0].segment, one[0].start)):
            yield key, self.get(key)

    def add(self, answers: Mapping[str, Answer], refused: Mapping[str, str] | None = None) -> None:
        """Makes them durable, and why others were refused, as one segment."""
        refusals = {_of_refusal(key): {"refused": why} for key, why in (refused or {}).items()}
        if every := {**answers, **refusals}:
            lines = [to_json({"key": key, "answer": dict(one)}) for key, one in every.items()]
            try:
                self._put([line.encode() for line in lines])
            except _GoneError:
                self._forget_all()
                self.look()
            self._merge_small()

    def merge(self) -> None:
        """Removes what killed writers left, and merges small segments where there are many."""
        self._store.drop_drafts(self.folder)
        self._merge_small()

    def _merge_small(self) -> None:
        small = sorted(name for name, size in self._read.items() if size < SMALL_BYTES)
        if len(small) <= MOST_SMALL:
            return
        ends = np.cumsum([self._read[name] for name in small])
        some = small[: int(np.searchsorted(ends, MERGED_BYTES, side="right"))]
        try:
            # Also lines that are in another segment too: others may remove that meanwhile.
            merged = self._put(self._lines_of(some))
        except _GoneError:  # another process merges them
            self._forget_all()
            self.look()
            return
        left = {*some} - {merged}
        self._forget(left)
        for name in left:  # only now: what was in it is durable elsewhere
            self._store.remove(self.folder / name)

    def _lines_of(self, segments: Collection[str]) -> list[bytes]:
        """A line for each key in the segments, the smallest."""
        least: dict[str, bytes] = {}
        for name in segments:
            for line in self._content(name).splitlines(keepends=True):
                key, is_usable = _looked_at(line)
                if is_usable:
                    least[key] = min(line, least.get(key, line))
        return [*least.values()]

    def _put(self, lines: list[bytes]) -> str:
        # Sorted, so that segments of the same answers are one: of two that only differ in their
        # order, one process could remove the first for the second, and another the reverse.
        payload = b"".join(sorted(lines))
        name = f"{hashlib.sha256(payload).hexdigest()}.jsonl"
        if self._store.has_folders and not self.folder.is_dir():
            self._store.make_folder(self.folder)
        self._store.put_if_absent(self.folder / name, payload, label="answers")
        self._index(name, payload)
        return name

    def _has_seen_all(self) -> bool:
        """Whether all segments could be read; not while another process merges some of them."""
        names = self._names()
        gone = self._read.keys() - names
        if gone and names != self._names():
            return False
        forgotten = self._forget(gone)
        try:
            for name in sorted(names - self._read.keys()):
                self._index(name, self._content(name))
        except _GoneError:  # and a segment may be read in part
            self._forget_all()
            return False
        if all(key in self._spans for key in forgotten):
            return True
        self._forget_all()  # a segment that was read before may hold them too
        return False

    def _names(self) -> set[str]:
        found = self._store.listed(self.folder) if self.folder.is_dir() else []
        return {path.name for path in found if NAME.fullmatch(path.name)}

    def _forget_all(self) -> None:
        self._spans.clear()
        self._read.clear()
        self._contents.clear()

    def _forget(self, segments: Collection[str]) -> list[str]:
        """Returns the keys whose answers were read there."""
        if not segments:
            return []
        for name in segments:
            self._read.pop(name, None)
            self._contents.pop(name, None)
        held = [key for key, span in self._spans.items() if span.segment in segments]
        for key in held:
            del self._spans[key]
        return held

    def _index(self, name: str, payload: bytes) -> None:
        start = 0
        for line in payload.splitlines(keepends=True):
            key, is_usable = _looked_at(line)
            known = self._spans.get(key)
            if not is_usable:
                self._unusable.add(key)
            # Of equal lines the new one: what it is merged from is about to go.
            elif known is None or line <= self._line(known):
                self._spans[key] = _Span(name, start, len(line))
            start += len(line)
        self._read[name] = len(payload)

    def _line(self, span: _Span) -> bytes:
        return self._content(span.segment)[span.start : span.start + span.size]

    def _content(self, name: str) -> bytes:
        """A segment's bytes, checked against its name."""
        if name in self._contents:
            self._contents.move_to_end(name)
            return self._contents[name]
        path = self.folder / name
        try:
            payload = self._store.read(path)
        except PathError as error:
            if path.is_file():
                raise
            raise _GoneError(name) from error
        if f"{hashlib.sha256(payload).hexdigest()}.jsonl" != name:
            raise CorruptionError(
                f"{path} is damaged: its bytes are not those that it is named by. Remove it, and "
                "run the same command again: the answers in it are asked for again."
            )
        self._contents[name] = payload
        while len(self._contents) > KEPT_SEGMENTS:
            self._contents.popitem(last=False)
        return payload


def _looked_at(line: bytes) -> tuple[str, bool]:
    """The key of a line, and whether its answer can be written into a table."""
    record = json.loads(line)
    answer = record["answer"]
    return record["key"], all(is_token_count(answer[name]) for name in _COUNTS if name in answer)


def _of_refusal(key: str) -> str:
    return digest(["refused", key])
