"""The process that renders this one's chat templates: started once, and again after it has died."""

from __future__ import annotations

import atexit
import json
import marshal
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from ...schemas.errors import AlignError
from . import template_worker
from .template_worker import ANSWER, LENGTH, NO_MEMORY, READY, SPAN

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


@dataclass(frozen=True)
class Rendered:
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

    def message(self, requests: Sequence[bytes]) -> bytes:
        """What the worker is sent."""
        limits, is_alone = self.limits, len(requests) == 1
        body = marshal.dumps(
            (self.template, limits.seconds, limits.text, is_alone, self.specials, [*requests])
        )
        return LENGTH.pack(len(body)) + body


def answers_of(rendering: Rendering, requests: Sequence[bytes]) -> Iterator[Rendered]:
    """An answer to each request; a process that dies of one is replaced for the others."""
    done = 0
    while done < len(requests):
        rest = requests[done:]
        found = _answered(rendering, rest)
        # If one of them killed the process before any answer was sent, which one is not known.
        for answer in found or _until_killed(rendering, rest):
            yield answer
            done += 1


def _until_killed(rendering: Rendering, requests: Sequence[bytes]) -> Iterator[Rendered]:
    """The answers of requests that are made one by one, up to the first that kills."""
    for request in requests:
        (answer,) = _answered(rendering, [request])
        yield answer
        if answer.status in (KILLED, OVER_TIME):
            return


def _answered(rendering: Rendering, requests: Sequence[bytes]) -> list[Rendered]:
    """The answers that came before the process died; one at least if it was asked for one."""
    message = rendering.message(requests)
    for _ in range(2):
        with _SHARED.lock:
            worker = _SHARED.running()
            try:
                found = worker.exchange(message, len(requests))
            except BaseException:
                worker.close()  # its answer would be taken for that of the next request
                raise
        if found or not worker.was_killed_by_others:
            break
    else:
        raise AlignError(
            "The process that renders chat templates was killed twice, which no template does: "
            "most likely memory ran out. The same command goes on."
        )
    if not found and len(requests) == 1:
        found.append(Rendered(OVER_TIME if worker.code == -signal.SIGPROF else KILLED))
    return found


class _Worker:
    """A running worker and the pipes to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, json.dumps(sys.path), _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if self._target.readline() != READY:
            self.close()
            raise AlignError(
                f"{sys.executable} does not start the process that renders chat templates; what "
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

    def exchange(self, message: bytes, count: int) -> list[Rendered]:
        """The answers; if some are missing, it has ended."""
        found: list[Rendered] = []
        try:
            self._source.write(message)
            self._source.flush()
            while len(found) < count and (answer := self._answer()):
                found.append(answer)
                if answer.status == NO_MEMORY:
                    break
        except BrokenPipeError:
            pass  # it has ended before it has read the message
        if len(found) < count or found[-1].status == NO_MEMORY:
            self._end()
        return found

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
        spans = self._target.read(count * SPAN.size)
        text = self._target.read(length)
        if len(text) < length:
            return None
        return Rendered(
            status, text.decode("utf-8", "surrogatepass"), tuple(SPAN.iter_unpack(spans))
        )

    @property
    def _source(self) -> IO[bytes]:
        assert self._process.stdin
        return self._process.stdin

    @property
    def _target(self) -> IO[bytes]:
        assert self._process.stdout
        return self._process.stdout


_PROGRAM = str(template_worker.__file__)


class _Shared:
    """The worker of this process, which all of its threads share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._worker: _Worker | None = None
        self._of_parents: list[_Worker] = []  # kept: nobody may end them here

    def running(self) -> _Worker:
        """The worker; another one if it has died."""
        if self._worker is None or self._worker.code is not None:
            self._worker = _Worker()
        return self._worker

    def forget(self) -> None:
        """In a process that was forked: the worker is still its parent's."""
        if self._worker:
            self._of_parents.append(self._worker)
        self._worker, self.lock = None, threading.Lock()

    def close(self) -> None:
        """Ends the worker."""
        if self._worker and self._worker.code is None:
            self._worker.close()


_SHARED = _Shared()
os.register_at_fork(after_in_child=_SHARED.forget)
atexit.register(_SHARED.close)
