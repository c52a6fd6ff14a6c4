"""The process that renders this one's templates: started once, and again after it has died.

It renders a batch while this process does something else. Another one is sent once all answers are
read, for if both sides wrote at once, each could wait for the other to read.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import marshal
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from ...schemas.data_options import TokenOptions
from ...schemas.errors import AlignError
from . import template_worker
from .template_worker import ANSWER, CHAT, LENGTH, MIB, NO_MEMORY, READY, SPAN, TOO_LARGE

MOST_TEXT = 1 << 20  # characters of a template: those of models have some 10,000
PIPE = 1 << 20  # bytes, if the system allows it: the worker waits when its answers fill the pipe
KILLED = -1  # a status beside those of the worker: it died of a rendering
OVER_TIME = -2

# With the modules of this process, wherever they are from, and none of what a site adds.
_START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "runpy.run_path(sys.argv[2], run_name='__main__')"
)
# The end of its time, and the crashes of an interpreter.
_OF_TEMPLATES = {
    *(signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
}


@dataclass(frozen=True)
class Limits:
    """What one rendering may take."""

    seconds: float  # of processor time
    text: int  # bytes, beside those of the row itself

    @staticmethod
    def of(options: TokenOptions) -> Limits:
        """Those of the settings."""
        return Limits(options.template_seconds, int(options.template_mib * MIB))

    def broken_by(self, answer: Rendered) -> str:
        """What a template did that broke its rendering off: the rest of a sentence about it."""
        mib = self.text / MIB
        return {
            OVER_TIME: f"takes more than {self.seconds:g} s of processor time "
            "(tokens.template_seconds)",
            TOO_LARGE: f"adds more than {mib:g} MiB of text (tokens.template_mib)",
            NO_MEMORY: f"takes more memory than a text of {mib:g} MiB needs (tokens.template_mib)",
            KILLED: "crashes the process that renders it",
        }.get(answer.status, answer.text)


class Rendered(NamedTuple):
    """What a request came to: a text, or the message of what went wrong."""

    status: int
    text: str = ""
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Rendering:
    """A template, the limits and the special tokens that it is rendered with."""

    template: str
    limits: Limits
    specials: dict[str, Any]
    form: str = CHAT

    def message(self, requests: Sequence[bytes]) -> bytes:
        """What the worker is sent."""
        limits, is_alone = self.limits, len(requests) == 1
        how = self.form, self.template, limits.seconds, limits.text, is_alone, self.specials
        body = marshal.dumps((*how, [*requests]))
        return LENGTH.pack(len(body)) + body


class Batch:
    """Requests that were sent to be rendered."""

    def __init__(self, rendering: Rendering, requests: Sequence[bytes]) -> None:
        self.requests = requests
        self._rendering = rendering
        begun = time.monotonic()
        if requests:
            self._message = rendering.message(requests)
            self._exchange = _SHARED.begin(self._message, len(requests))
        self.sent = time.monotonic()
        self.seconds_to_send = self.sent - begun  # long if a process had to be started

    def answers(self) -> Iterator[Rendered]:
        """An answer to each request; a process that dies of one is replaced for the others."""
        batch, rest = self, self.requests
        while rest:
            done = 0
            # If one of them killed the process before any answer was sent, which one is not known.
            for answer in batch._found() or _until_killed(self._rendering, rest):
                yield answer
                done += 1
            rest = rest[done:]
            batch = Batch(self._rendering, rest)

    def _found(self) -> list[Rendered]:
        """The answers that came before the process died; one at least if it was asked for one."""
        found, worker = _SHARED.end(self._exchange), self._exchange.worker
        if not found and worker.was_killed_by_others:
            again = _SHARED.begin(self._message, len(self.requests))
            found, worker = _SHARED.end(again), again.worker
            if not found and worker.was_killed_by_others:
                raise AlignError(
                    "The process that renders templates was killed twice, which no template "
                    "does: most likely memory ran out. The same command goes on."
                )
        if not found and len(self.requests) == 1:
            found.append(Rendered(OVER_TIME if worker.code == -signal.SIGPROF else KILLED))
        return found


def _until_killed(rendering: Rendering, requests: Sequence[bytes]) -> Iterator[Rendered]:
    """The answers of requests that are made one by one, up to the first that kills."""
    for request in requests:
        (answer,) = Batch(rendering, [request]).answers()
        yield answer
        if answer.status in (KILLED, OVER_TIME):
            return


class _Worker:
    """A running worker and the pipes to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, json.dumps(sys.path), _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=PIPE,
        )
        for pipe in (self._source, self._target):
            with suppress(OSError, AttributeError):  # only Linux has larger ones
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE)
        if self._target.readline() != READY:
            self.close()
            raise AlignError(
                f"{sys.executable} does not start the process that renders templates; what "
                "it says is above."
            )

    @property
    def code(self) -> int | None:
        """The exit code once it has ended, as subprocess tells it."""
        return self._process.returncode

    @property
    def was_killed_by_others(self) -> bool:
        """Whether it has ended by a signal that no template causes."""
        return self.code is not None and self.code < 0 and -self.code not in _OF_TEMPLATES

    def send(self, message: bytes) -> None:
        """Sends a message; if it has ended, no answer will come."""
        with self._closed_if_interrupted(), suppress(BrokenPipeError):
            self._source.write(message)
            self._source.flush()

    def receive(self, count: int) -> list[Rendered]:
        """The answers to a message; if some are missing, it has ended."""
        found: list[Rendered] = []
        with self._closed_if_interrupted():
            while len(found) < count and (answer := self._answer()):
                found.append(answer)
                if answer.status == NO_MEMORY:
                    break
            if len(found) < count or found[-1].status == NO_MEMORY:
                self._end()
        return found

    @contextmanager
    def _closed_if_interrupted(self) -> Iterator[None]:
        """Else an answer would be taken for that of the next request."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._end()

    def _end(self) -> None:
        self._process.wait()
        self._target.close()
        with suppress(BrokenPipeError):  # of what it has not read
            self._source.close()

    def _answer(self) -> Rendered | None:
        """The next answer; None if the process is gone."""
        head = self._target.read(ANSWER.size)
        if len(head) < ANSWER.size:
            return None
        status, count, length = ANSWER.unpack(head)
        spans = tuple(SPAN.iter_unpack(self._target.read(count * SPAN.size))) if count else ()
        text = self._target.read(length)
        if len(text) < length:
            return None
        return Rendered(status, text.decode("utf-8", "surrogatepass"), spans)

    @property
    def _source(self) -> IO[bytes]:
        assert self._process.stdin
        return self._process.stdin

    @property
    def _target(self) -> IO[bytes]:
        assert self._process.stdout
        return self._process.stdout


_PROGRAM = str(template_worker.__file__)


class _Exchange:
    """A message that a worker was sent, and its answers once they are read."""

    def __init__(self, worker: _Worker, count: int) -> None:
        self.worker = worker
        self._count = count
        self._found: list[Rendered] | None = None

    def found(self) -> list[Rendered]:
        """The answers, for which this waits."""
        if self._found is None:
            self._found = []  # if this is interrupted
            self._found = self.worker.receive(self._count)
        return self._found


class _Shared:
    """The worker of this process, which all of its threads share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._worker: _Worker | None = None
        self._open: _Exchange | None = None  # whose answers are not read
        self._of_parents: list[_Worker] = []  # kept: nobody may end them here

    def begin(self, message: bytes, count: int) -> _Exchange:
        """Sends a message; the answers to the one before are read first, whoever sent it."""
        with self.lock:
            worker = self.running()
            worker.send(message)
            self._open = _Exchange(worker, count)
            return self._open

    def end(self, exchange: _Exchange) -> list[Rendered]:
        """The answers to a message."""
        with self.lock:
            if self._open is exchange:
                self._open = None
            return exchange.found()

    def running(self) -> _Worker:
        """The worker, which waits for a message; another one if it has died."""
        if self._open:
            exchange, self._open = self._open, None
            exchange.found()
        if self._worker is None or self._worker.code is not None:
            self._worker = _Worker()
        return self._worker

    def forget(self) -> None:
        """In a process that was forked: the worker is still its parent's."""
        if self._worker:
            self._of_parents.append(self._worker)
        self._worker = self._open = None
        self.lock = threading.Lock()

    def close(self) -> None:
        """Ends the worker."""
        if self._worker and self._worker.code is None:
            self._worker.close()


_SHARED = _Shared()
os.register_at_fork(after_in_child=_SHARED.forget)
atexit.register(_SHARED.close)
