"""The journal of a run, `metrics.jsonl`: a line per step or evaluation.

{"step":10,"time":1763735000.123,"loss":0.693,…} - finite numbers only; the rest is left out.
An evaluation has a line of its own: a step's line is durable before its checkpoint is, and the
checkpoint before an evaluation begins, so a line that waited for both could be lost.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...schemas.safe_text import redacted
from ..storage.disk.lines import Line, Lines, keep_lines, read_lines

logger = logging.getLogger("align")


class Callback(Protocol):
    """Observer of every line of a training run's journal; an error it raises ends the run."""

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Receives a written line; names of held-out rows' metrics begin with `eval/`."""
        ...


@dataclass(frozen=True)
class MetricPoint:
    """One number, as a tracking store keeps it."""

    key: str
    value: float
    step: int
    time_ms: int  # since 1970


RESERVED = ("step", "time")
POINTS_AT_ONCE = 10_000
MOST_STEPS = 1 << 53
LAST_TIME = 1e11  # seconds since 1970; in the year 5138


def open_journal(path: Path, *, keep_through: int, is_evaluated: bool = True) -> Journal:
    """Continues after the lines of steps up to `keep_through`; drops later ones, -1: all.

    Of a last step that is not evaluated yet, the line of an evaluation is dropped as well.
    """
    dropped = _drop_after(path, keep_through, is_evaluated) if path.exists() else 0
    return Journal(path, dropped)


class Journal:
    """Appends a line per logged step; every line is handed to the system at once."""

    def __init__(self, path: Path, dropped: int = 0) -> None:
        self.dropped = dropped  # whole lines that were left out when it was opened
        self._lines = Lines(path)

    def append(self, metrics: Mapping[str, float], *, step: int) -> dict[str, float]:
        """Writes one line and returns its numbers; a NaN or infinite value is left out of it."""
        named = {key_of(name): float(value) for name, value in metrics.items()}
        assert not set(RESERVED) & set(named), sorted(named)
        finite = {name: value for name, value in named.items() if math.isfinite(value)}
        line = {"step": step, "time": round(time.time(), 3), **finite}
        self._lines.append(json.dumps(line, separators=(",", ":")).encode())
        return finite

    def sync(self) -> None:
        """Makes all lines durable; a checkpoint must not know of more steps than this file."""
        self._lines.sync()

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


@dataclass(frozen=True)
class Entry:
    """One line, read back."""

    points: tuple[MetricPoint, ...]
    step: int
    end: int  # where the next line begins, in bytes


def read_entries(path: Path, start: int, *, max_points: int) -> list[Entry]:
    """Whole lines from a byte on, until they hold so many points; unreadable ones are empty."""
    entries: list[Entry] = []
    points = 0
    for line in read_lines(path, start):
        entries.append(_entry(line))
        points += len(entries[-1].points)
        if points >= max_points:
            break
    return entries


def entry_batches(path: Path) -> Iterator[list[Entry]]:
    """Every whole line that can be read, some at a time; how many cannot is told."""
    start = lost = 0
    while entries := read_entries(path, start, max_points=POINTS_AT_ONCE):
        yield [entry for entry in entries if entry.points]
        start = entries[-1].end
        lost += sum(entry.step < 0 for entry in entries)
    if lost:
        logger.warning("%s: %d lines cannot be read and are left out.", path, lost)


def _drop_after(path: Path, step: int, is_evaluated: bool) -> int:
    lines = [*read_lines(path)]
    plain = [_parsed(line.text) for line in lines]
    kept = [
        line
        for line, fields in zip(lines, plain, strict=True)
        if fields is not None
        and (fields["step"] < step or (fields["step"] == step and _stays(fields, is_evaluated)))
    ]
    if lost := plain.count(None):
        logger.warning("%s: %d lines cannot be read and are dropped.", path, lost)
    keep_lines(path, kept)
    return len(lines) - len(kept)


def _stays(fields: dict[str, Any], is_evaluated: bool) -> bool:
    return is_evaluated or not any(name.startswith(EVAL) for name in fields)


def _entry(line: Line) -> Entry:
    fields = _parsed(line.text)
    if fields is None:
        return Entry((), -1, line.end)
    step, time_ms = fields["step"], round(fields["time"] * 1000)
    points = [
        MetricPoint(name, float(value), step, time_ms)
        for name, value in fields.items()
        if name not in RESERVED and isinstance(value, int | float)
    ]
    return Entry(tuple(points), step, line.end)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    is_at = type(fields.get("step")) is int and isinstance(fields.get("time"), int | float)
    return fields if is_at and _in_bounds(fields) else None


def _in_bounds(fields: dict[str, Any]) -> bool:
    """Whether a table can hold the numbers of a line; no line is written with others."""
    numbers = [value for value in fields.values() if isinstance(value, int | float)]
    # NaN is not below anything.
    are_finite = all(abs(value) <= sys.float_info.max for value in numbers)
    return are_finite and 0 <= fields["step"] < MOST_STEPS and 0 <= fields["time"] < LAST_TIME


EVAL = "eval/"  # begins the name of what was measured on held-out rows
MAX_KEY = 250
MAX_PARAM = 6000
MAX_TAG = 5000  # what the oldest SQL schema still holds
MAX_DATASET_NAME = 500
MAX_DIGEST = 36


def key_of(name: str) -> str:
    """The name with `_` for what is not allowed, and no part that a path would swallow."""
    allowed = re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_KEY].rstrip("/") or "_"


def shortened(value: str, limit: int) -> str:
    """The value without secrets, its end cut off where it is too long."""
    value = redacted(value)
    return value if len(value) <= limit else f"{value[: limit - 1]}…"
