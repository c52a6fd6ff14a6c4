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
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ..storage.disk.lines import Line, Lines, keep_lines, read_lines

logger = logging.getLogger("align")

RESERVED = ("step", "time")
EVAL = "eval/"  # begins the name of a metric of held-out rows
MAX_KEY = 250


class Callback(Protocol):
    """Observer of every line of a training run's metrics; an error it raises ends the run."""

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Receives a written line; names of held-out rows' metrics begin with `eval/`."""
        ...


class MetricsLine(NamedTuple):
    """One line, read back."""

    step: int
    time: float  # seconds since 1970
    metrics: dict[str, float]
    end: int  # the offset of the next line, in bytes

    @property
    def is_eval(self) -> bool:
        """Whether it is the line of an evaluation."""
        return any(name.startswith(EVAL) for name in self.metrics)


class MetricsLog:
    """Appends a line per logged step; every line is handed to the system at once."""

    def __init__(self, path: Path, kept: Sequence[Line] = ()) -> None:
        """Resumes after these lines of the file; all others are cut out of it."""
        if path.exists():
            keep_lines(path, kept)
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


def kept_lines(
    path: Path, *, keep_through: int, is_evaluated: bool = True
) -> tuple[list[Line], int]:
    """The lines of steps up to `keep_through` (-1: none), and how many others there are.

    If the last kept step is not evaluated yet, the line of its evaluation is not kept either.
    """
    raw = [*read_lines(path)] if path.exists() else []
    kept = [
        line
        for line, one in zip(raw, _parsed(raw, path), strict=True)
        if one
        and (
            one.step < keep_through
            or (one.step == keep_through and (is_evaluated or not one.is_eval))
        )
    ]
    return kept, len(raw) - len(kept)


def read_metrics(path: Path, start: int = 0) -> Iterator[MetricsLine]:
    """The whole lines from a byte on; a line that cannot be read is left out, with a warning."""
    return filter(None, _parsed(read_lines(path, start), path))


def _parsed(lines: Iterable[Line], path: Path) -> Iterator[MetricsLine | None]:
    """Each line, None for one that is damaged; their number is logged."""
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
        logger.warning("%s: %d lines cannot be read and are left out.", path, lost)


def key_of(name: str) -> str:
    """The name with `_` for characters that MLflow refuses, and without parts like `..`."""
    allowed = re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_KEY].rstrip("/") or "_"
