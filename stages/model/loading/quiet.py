"""Silences libraries while a model is loaded."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import transformers

_LOCK = threading.Lock()
_CHANGES = ExitStack()  # how to put back what the first thread inside has changed
_inside = 0


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings, progress bars and advice of libraries inside.

    All of these belong to the process, and a model may be loaded in a thread of its own: the first
    thread inside changes them, and the last one to leave puts them back.
    """
    global _inside  # noqa: PLW0603 - one count for the process
    with _LOCK:
        if not _inside:
            _CHANGES.enter_context(_silenced())
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                _CHANGES.close()


@contextmanager
def _silenced() -> Iterator[None]:
    logs: Any = transformers.utils.logging
    packer = logging.getLogger("bitsandbytes")  # peft imports it wherever it is installed
    verbosity, bars, level = logs.get_verbosity(), logs.is_progress_bar_enabled(), packer.level
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    packer.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        packer.setLevel(level)
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()
