"""Progress: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import importlib
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TextIO

from ...schemas.safe_text import safe


class Progress(Protocol):
    """A person watching."""

    def say(self, line: str) -> None:
        """One plain sentence."""
        ...

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        """A task with so many things to do, when that is known."""
        ...

    def advance(self, done: int, *, tokens: int = 0, padding: int = 0) -> None:
        """So many more are done."""
        ...

    def end(self) -> None:
        """The task is over."""
        ...


SECONDS_PER_LINE = 5.0
SECONDS_PER_FRAME = 0.1


def make_progress(stream: TextIO | None = None) -> Progress:
    """Shows progress on a stream; None is standard error as it is now."""
    chosen = sys.stderr if stream is None else stream
    if chosen.isatty() and os.environ.get("TERM") != "dumb":
        return BarProgress(chosen)
    return LineProgress(chosen)


class LineProgress:
    """A line when a task begins and ends, and one every few seconds between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._meter: TaskProgress | None = None
        self._last_line = 0.0

    def say(self, line: str) -> None:
        """One plain sentence."""
        with suppress(OSError):  # the reader is gone; the work is not
            self._stream.write(_plain(line, self._stream) + "\n")
            self._stream.flush()

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        """Prints the task that begins."""
        self.end()
        self._meter = TaskProgress(task, total, unit)
        self._last_line = time.monotonic()
        self.say(self._meter.opening())

    def advance(self, done: int, *, tokens: int = 0, padding: int = 0) -> None:
        """Counts, and says so when the last line is old enough."""
        assert self._meter, "a task must have begun"
        self._meter.add(done, tokens, padding)
        if time.monotonic() - self._last_line >= SECONDS_PER_LINE:
            self._last_line = time.monotonic()
            self.say(self._meter.so_far())

    def end(self) -> None:
        """Says what was done."""
        if self._meter:
            self.say(self._meter.closing())
        self._meter = None


class BarProgress:
    """A bar that is redrawn in place, and a line in its stead when the task is over."""

    def __init__(self, stream: TextIO) -> None:
        self._lines = LineProgress(stream)
        self._stream = stream
        self._meter: TaskProgress | None = None
        self._bar: Any = None
        self._last_frame = 0.0

    def say(self, line: str) -> None:
        """One plain sentence, above the bar when there is one."""
        if self._bar is None:
            self._lines.say(line)
            return
        with suppress(OSError):
            text = _plain(line, self._stream)
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        """Draws an empty bar."""
        self.end()
        self._meter = TaskProgress(_plain(task, self._stream), total, unit)
        with suppress(OSError):
            self._bar = _rich_bar(self._stream)
            self._bar.add_task(self._meter.task, total=total, counted="", speed="")
            self._bar.start()
            # A killed process could not bring the cursor back.
            self._bar.console.show_cursor(True)

    def advance(self, done: int, *, tokens: int = 0, padding: int = 0) -> None:
        """Counts, and redraws when the last frame is old enough."""
        assert self._meter, "a task must have begun"
        self._meter.add(done, tokens, padding)
        if time.monotonic() - self._last_frame >= SECONDS_PER_FRAME:
            self._last_frame = time.monotonic()
            self._draw(self._meter)

    def end(self) -> None:
        """Takes the bar away and says what was done."""
        if self._meter is None:
            return
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
        self._bar = None
        self._lines.say(self._meter.closing())
        self._meter = None

    def _draw(self, meter: TaskProgress) -> None:
        if self._bar is not None:
            with suppress(OSError):
                first = self._bar.task_ids[0]
                shown = {"counted": meter.counted(), "speed": meter.speed()}
                self._bar.update(first, completed=meter.done, **shown)
                self._bar.refresh()


def _rich_bar(stream: TextIO) -> Any:
    # Only a terminal pays for the import.
    columns = importlib.import_module("rich.progress")
    console = importlib.import_module("rich.console").Console(file=stream)
    return columns.Progress(
        columns.TextColumn("{task.description}", markup=False),
        columns.BarColumn(),
        columns.TextColumn("{task.fields[counted]}  {task.fields[speed]}", markup=False),
        columns.TimeRemainingColumn(compact=True),
        console=console,
        # No drawing thread: tokenizing processes are forked from this one.
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
    )


def _plain(text: str, stream: TextIO) -> str:
    """One line without control characters and secrets, in the encoding of the stream."""
    shown = " ".join(safe(text).split("\n")).replace("\t", " ")
    encoding = stream.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


@dataclass
class TaskProgress:
    """Counters of one task."""

    task: str
    total: int | None
    unit: str
    done: int = 0
    tokens: int = 0  # run through the model, padding included
    padding: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, done: int, tokens: int, padding: int) -> None:
        """Counts so many more."""
        self.done += done
        self.tokens += tokens
        self.padding += padding

    def opening(self) -> str:
        """The task and its size."""
        return self.task if self.total is None else f"{self.task}: {self.total:,} {self.unit}"

    def so_far(self) -> str:
        """The progress so far, and the time left."""
        left = self._left()
        parts = [self.counted(), *self._speed()]
        return f"{self.task}: {', '.join(parts + ([f'{left} left'] if left else []))}"

    def closing(self) -> str:
        """The total, and the time it took."""
        counted = self.counted() if self.done != self.total else f"{self.done:,} {self.unit}"
        took = f"{counted} in {_clock(self._elapsed())}"
        return f"{self.task}: {', '.join([took, *self._speed()])}"

    def counted(self) -> str:
        """The done count, of the total."""
        if not self.total:
            return f"{self.done:,} {self.unit}"
        return f"{self.done:,} of {self.total:,} {self.unit} ({self.done / self.total:.0%})"

    def speed(self) -> str:
        """Tokens per second and the share of padding, if any; empty before the first token."""
        return ", ".join(self._speed())

    def _speed(self) -> list[str]:
        if not self.tokens:
            return []
        per_second = self.tokens / max(self._elapsed(), 1e-9)
        padding = [f"{self.padding / self.tokens:.1%} padding"] if self.padding else []
        return [f"{per_second:,.0f} tokens/s", *padding]

    def _left(self) -> str:
        if not self.total or not self.done or self.done >= self.total:
            return ""
        return _clock(self._elapsed() / self.done * (self.total - self.done))

    def _elapsed(self) -> float:
        return time.monotonic() - self.started


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class NoProgress:
    """Takes everything a `Progress` takes and shows none of it."""

    def say(self, line: str) -> None:
        """Shows nothing."""

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        """Shows nothing."""

    def advance(self, done: int, *, tokens: int = 0, padding: int = 0) -> None:
        """Shows nothing."""

    def end(self) -> None:
        """Shows nothing."""
