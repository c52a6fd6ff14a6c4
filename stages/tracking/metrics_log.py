"""The metrics log of a run, `metrics.jsonl`: one line per logged step or evaluation.

A line is {"step":10,"time":1763735000.123,"loss":0.693,…}. NaN and infinite values are left out.
An evaluation gets its own line, because a step's line is durable before the evaluation starts.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ..storage.disk.lines import Line, Lines, keep_lines, read_lines

logger = logging.getLogger("align")

RESERVED = ("step", "time")
EVAL = "eval/"  # prefix of the metrics of held-out rows
EVALUATE = "evaluate/"  # and of those that `align evaluate` adds to a finished run
MAX_KEY = 250


class Callback(Protocol):
    """A function that receives each metrics line; if it raises an error, the run ends."""

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Receives a line after it is written; metrics of held-out rows start with `eval/`."""
        ...


class MetricsLine(NamedTuple):
    """One line of the metrics log."""

    step: int
    time: float  # seconds since 1970
    metrics: dict[str, float]
    end: int  # byte offset of the next line

    @property
    def is_eval(self) -> bool:
        """Whether this is the line of an evaluation."""
        return any(name.startswith(EVAL) for name in self.metrics)


def prefix_of(name: str) -> str:
    """The prefix of the metrics of a held-out set; a set alone may have no name."""
    return f"{EVAL}{name}/" if name else EVAL


class MetricsLog:
    """Appends lines to metrics.jsonl, unbuffered."""

    def __init__(self, path: Path, kept: Sequence[Line] = ()) -> None:
        """Opens the file and removes all lines except `kept`."""
        if path.exists():
            keep_lines(path, kept)
        self._lines = Lines(path)

    def append(self, metrics: Mapping[str, float], *, step: int) -> dict[str, float]:
        """Writes one line and returns its finite numbers."""
        named = {key_of(name): float(value) for name, value in metrics.items()}
        assert not set(RESERVED) & set(named), sorted(named)
        finite = {name: value for name, value in named.items() if math.isfinite(value)}
        line = {"step": step, "time": round(time.time(), 3), **finite}
        self._lines.append(json.dumps(line, separators=(",", ":")).encode())
        return finite

    def sync(self) -> None:
        """Makes all lines durable; a checkpoint must not have more steps than this file."""
        self._lines.sync()

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def kept_lines(
    path: Path, *, keep_through: int, is_evaluated: bool = True
) -> tuple[list[Line], int]:
    """The lines of steps up to `keep_through` (-1: none), and the number of other lines.

    `is_evaluated`: whether the line of the last kept step's evaluation is kept too.
    """
    raw = [*read_lines(path)] if path.exists() else []
    kept = []
    for line, one in zip(raw, _parsed(raw, path), strict=True):
        if one is None:
            continue
        is_last = one.step == keep_through and (is_evaluated or not one.is_eval)
        if one.step < keep_through or is_last:
            kept.append(line)
    return kept, len(raw) - len(kept)


def read_metrics(path: Path, start: int = 0) -> Iterator[MetricsLine]:
    """The complete lines from byte `start` on; unreadable lines are skipped with a warning."""
    return filter(None, _parsed(read_lines(path, start), path))


def _parsed(lines: Iterable[Line], path: Path) -> Iterator[MetricsLine | None]:
    """Each line, or None if it is damaged; logs the number of damaged lines."""
    lost = 0
    for line in lines:
        try:
            fields = json.loads(line.text)
            step, when = int(fields.pop("step")), float(fields.pop("time"))
            numbers = {name: float(value) for name, value in fields.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            lost += 1
            yield None
        else:
            yield MetricsLine(step, when, numbers, line.end)
    if lost:
        logger.warning("%s: %d lines are damaged and are skipped.", path, lost)


def key_of(name: str) -> str:
    """The name with `_` in place of characters that MLflow refuses, and without `.` and `..`."""
    allowed = re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_KEY].rstrip("/") or "_"
