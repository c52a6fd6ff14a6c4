"""Silences libraries in the thread that loads a model, while others are heard."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' progress bars and advice inside, and warnings.

    Printed lines go to stderr: with a device_map DeepSpeed is imported, which prints. What the main
    thread prints, or warns of, is silenced only if it is inside itself; log levels are those of the
    process.
    """
    _threads.enter()
    # Each time, as a `catch_warnings` of another thread may have undone it.
    warnings.simplefilter("ignore", _OfQuietThreads)
    try:
        yield
    finally:
        _threads.leave()


class _QuietThreads:
    """The threads inside: the first changes what is the process's, the last puts it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: list[int] = []
        self._changes = ExitStack()

    def have_this(self) -> bool:
        """Whether this thread is to be quiet: threads that a loading library starts are, too."""
        me = threading.get_ident()
        return me in self._inside or (bool(self._inside) and me != threading.main_thread().ident)

    def enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._changes.enter_context(_quiet_libraries())
            self._inside.append(threading.get_ident())

    def leave(self) -> None:
        with self._lock:
            self._inside.remove(threading.get_ident())
            if not self._inside:
                self._changes.close()


_threads = _QuietThreads()


class _InQuietThreads(type):
    def __subclasscheck__(cls, _: type) -> bool:
        return _threads.have_this()


class _OfQuietThreads(Warning, metaclass=_InQuietThreads):
    """The category, to a filter, of all warnings of quiet threads and of no others."""


class _Output:
    """Standard output, which to quiet threads is standard error."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr if _threads.have_this() else self._output, name)

    @staticmethod
    def around(output: Any) -> _Output:
        """One around this output, or around that of another, which somebody has put back."""
        return _Output(output._output if isinstance(output, _Output) else output)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    logs: Any = transformers.utils.logging
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    packer = logging.getLogger("bitsandbytes")  # which peft imports wherever it is installed
    level = packer.level
    packer.setLevel(logging.ERROR)
    output = _Output.around(sys.stdout)
    sys.stdout = output  # it has all that its output has
    try:
        yield
    finally:
        filters: Any = warnings.filters
        filters[:] = [one for one in filters if one[2] is not _OfQuietThreads]
        if sys.stdout is output:  # else who has replaced it meanwhile puts it back
            sys.stdout = output._output
        packer.setLevel(level)
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()
