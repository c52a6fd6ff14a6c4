"""Progress: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import importlib
import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, TextIO

from ...schemas.safe_text import safe

SECONDS_PER_LINE = 5.0
SECONDS_PER_FRAME = 0.1


class Progress:
    """Shows the start, progress and end of one task at a time; silent without a stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._is_terminal = bool(
            stream and stream.isatty() and os.environ.get("TERM", "") != "dumb"
        )
        self._bar: Any = None
        self._task = self._unit = ""  # empty: no task
        self._total: int | None = None
        self._done = self._tokens = self._padding = 0
        self._began_at = self._shown_at = 0.0

    def log(self, line: str) -> None:
        """Prints one line, above the bar if there is one."""
        if not self._stream:
            return
        with suppress(OSError):  # a closed terminal does not stop the work
            text = _plain(line, self._stream)
            if self._bar:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()

    def log_in_handler(self, line: str) -> None:
        """Like `log`, for a signal handler: it may have interrupted a write to the stream."""
        if not self._stream:
            return
        start = "\n" if self._bar else ""  # leaves the bar's line
        # A closed stream, or one without a file or of an unknown encoding: the step goes on.
        with suppress(OSError, ValueError, AttributeError, LookupError):
            text = f"{start}{_plain(line, self._stream)}\n"
            os.write(self._stream.fileno(), text.encode(self._stream.encoding or "utf-8"))

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        """Starts a task of `total` units; None if the number is unknown."""
        self.end()
        self._task, self._total, self._unit = task, total, unit
        self._done = self._tokens = self._padding = 0
        self._began_at = self._shown_at = time.monotonic()
        if self._stream and self._is_terminal:
            with suppress(OSError):
                self._bar = _rich_bar(self._stream)
                name = _plain(task, self._stream)
                self._bar.add_task(name, total=total, counted="", speed="")
                self._bar.start()
                self._bar.console.show_cursor(True)  # a killed process could not restore it
        else:
            self.log(task if total is None else f"{task}: {total:,} {unit}")

    def advance(self, done: int, *, tokens: int = 0, padding: int = 0) -> None:
        """Adds finished units and tokens (padding included), and updates the display regularly."""
        if not self._stream:
            return
        assert self._task, "begin() comes first"
        self._done += done
        self._tokens += tokens
        self._padding += padding
        now = time.monotonic()
        if now - self._shown_at < (SECONDS_PER_FRAME if self._bar else SECONDS_PER_LINE):
            return
        self._shown_at = now
        counted, speed = self._counted(), self._speed(now)
        if self._bar:
            with suppress(OSError):
                first = self._bar.task_ids[0]
                self._bar.update(first, completed=self._done, counted=counted, speed=speed)
                self._bar.refresh()
            return
        left = ""
        if self._total and 0 < self._done < self._total:
            rest = (now - self._began_at) / self._done * (self._total - self._done)
            left = f"{timedelta(seconds=round(rest))} left"
        self.log(f"{self._task}: {', '.join(filter(None, (counted, speed, left)))}")

    def end(self) -> None:
        """Ends the task and prints its units, time and speed."""
        if self._bar:
            with suppress(OSError):
                self._bar.stop()
        self._bar = None
        if self._task:
            now = time.monotonic()
            is_whole = self._done == self._total
            counted = f"{self._done:,} {self._unit}" if is_whole else self._counted()
            took = f"{counted} in {timedelta(seconds=round(now - self._began_at))}"
            self.log(f"{self._task}: {', '.join(filter(None, (took, self._speed(now))))}")
        self._task = ""

    def _counted(self) -> str:
        """The finished units, with the total if it is known."""
        if not self._total:
            return f"{self._done:,} {self._unit}"
        part = self._done / self._total
        return f"{self._done:,} of {self._total:,} {self._unit} ({part:.0%})"

    def _speed(self, now: float) -> str:
        """Tokens per second and the share of padding; empty before the first token."""
        if not self._tokens:
            return ""
        speed = f"{self._tokens / max(now - self._began_at, 1e-9):,.0f} tokens/s"
        return f"{speed}, {self._padding / self._tokens:.1%} padding" if self._padding else speed


def _rich_bar(stream: TextIO) -> Any:
    # Imported here because it is slow and only a terminal needs it.
    columns = importlib.import_module("rich.progress")
    console = importlib.import_module("rich.console").Console(file=stream)
    return columns.Progress(
        columns.TextColumn("{task.description}", markup=False),
        columns.BarColumn(),
        columns.TextColumn("{task.fields[counted]}  {task.fields[speed]}", markup=False),
        columns.TimeRemainingColumn(compact=True),
        console=console,
        # No drawing thread, because tokenizing processes are forked from this one.
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
    )


def _plain(text: str, stream: TextIO) -> str:
    """The text as one line, without control characters and secrets, in the stream's encoding."""
    shown = " ".join(safe(text).split("\n")).replace("\t", " ")
    encoding = stream.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)
