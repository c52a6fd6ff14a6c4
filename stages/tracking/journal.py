"""The metrics log of a run, `metrics.jsonl`: a line per logged step or evaluation.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ..storage.disk.lines import Line, Lines, keep_lines, read_lines

logger = logging.getLogger("align")

RESERVED = ("step", "time")
EVAL = "eval/"  # begins the name of a metric of held-out rows
MAX_KEY = 250
LATEST = 1e11  # seconds since 1970


class Callback(Protocol):
    """Observer of every line of a training run's metrics; an error it raises ends the run."""

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Receives a written line; names of held-out rows' metrics begin with `eval/`."""
        ...


class Entry(NamedTuple):
    """One line, read back."""

    step: int
    time: float  # seconds since 1970
    metrics: dict[str, float]
    end: int  # the offset of the next line, in bytes

    @property
    def is_eval(self) -> bool:
        """Whether it is the line of an evaluation."""
        return any(name.startswith(EVAL) for name in self.metrics)


def kept_lines(
    path: Path, *, keep_through: int, is_evaluated: bool = True
) -> tuple[list[Line], int]:
    """The lines of steps up to `keep_through` (-1: none), and how many others there are.

    If the last kept step is not evaluated yet, the line of its evaluation is not kept either.
    """
    lines = [*read_lines(path)] if path.exists() else []
    read = [(line, entry) for line in lines if (entry := _parsed(line))]
    if lost := len(lines) - len(read):
        logger.warning("%s: %d lines cannot be read and are dropped.", path, lost)
    kept = [
        line
        for line, entry in read
        if entry.step < keep_through
        or (entry.step == keep_through and (is_evaluated or not entry.is_eval))
    ]
    return kept, len(lines) - len(kept)


def open_journal(path: Path, kept: Sequence[Line] = ()) -> Journal:
    """Resumes after these lines of the file; all others are cut out of it."""
    if path.exists():
        keep_lines(path, kept)
    return Journal(path)


class Journal:
    """Appends a line per logged step; every line is handed to the system at once."""

    def __init__(self, path: Path) -> None:
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


def read_entries(path: Path, start: int = 0) -> Iterator[Entry]:
    """The whole lines from a byte on; a line that cannot be read is left out, with a warning."""
    lost = 0
    for line in read_lines(path, start):
        if entry := _parsed(line):
            yield entry
        else:
            lost += 1
    if lost:
        logger.warning("%s: %d lines cannot be read and are left out.", path, lost)


def _parsed(line: Line) -> Entry | None:
    try:
        fields = json.loads(line.text)
        step, when = fields.pop("step"), fields.pop("time")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    # NaN and what is infinite are JSON to Python; a store cannot keep them or a longer number.
    numbers = (step, when, *fields.values())
    if not all(isinstance(one, int | float) and abs(one) <= sys.float_info.max for one in numbers):
        return None
    if not (isinstance(step, int) and abs(step) < 2**53 and 0 <= when < LATEST):
        return None
    return Entry(step, when, fields, line.end)


def key_of(name: str) -> str:
    """The name with `_` for characters that MLflow refuses, and without parts like `..`."""
    allowed = re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_KEY].rstrip("/") or "_"
