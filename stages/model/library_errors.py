"""Turns errors of the libraries that read a model's folder into one message each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...schemas.errors import AlignError, MemoryLimitError, UsageError

LONGEST = 300  # characters of a library's message, which may quote a damaged value
NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "out of memory", "ALLOC_FAILED")


@contextmanager
def as_usage_error(message: str, remedy: str) -> Iterator[None]:
    """Turns any error of the block into a UsageError: message, library's words, remedy.

    Running out of memory gets a remedy of its own.
    """
    try:
        yield
    except AlignError:
        raise
    except Exception as error:  # libraries raise any type for a bad file
        if is_out_of_memory(error):
            raise MemoryLimitError(
                f"{message} (memory ran out: {in_short(error)}). Free some, or use a larger "
                "machine."
            ) from error
        raise UsageError(f"{message} ({in_short(error)}). {remedy}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, or of a CUDA library through it, means out of memory.

    It compares names and words, because torch is not imported for a tokenizer and has no type for
    all of them.
    """
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or any(word in str(error) for word in NO_MEMORY)


def in_short(error: BaseException) -> str:
    """A library's error in one line; its type if it has no message."""
    words = " ".join(str(error).split())
    if not words or isinstance(error, LookupError | AssertionError):
        words = f"{type(error).__name__} {words}".strip()
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}…"
