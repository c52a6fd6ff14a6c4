"""Every error that a user can see, with its exit code.

AlignError (2)
├── UsageError (2)          a wrong flag, setting, path or model folder
├── BadDataError (3)        too many rows cannot be used
├── FingerprintError (4)    the cache was made from other inputs
├── CorruptionError (5)     a file differs from the manifest
├── NonFiniteError (6)      a number is NaN or infinite
├── PeerError (69)          another rank of this run has ended
├── MemoryLimitError (71)   the batch or model does not fit into memory
├── ServerError (69)        a server or cluster gives no usable answer
├── StorageError (74)       I/O error
│   └── PathError (2)       a path is missing, forbidden or of the wrong kind
├── LockedError (75)        another process uses this folder
└── BudgetError (75)        the budget is spent; the same command resumes

Interrupted (129, 130, 138, 143)  stopped by a signal; not an AlignError: there is nothing to fix
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

logger = logging.getLogger("align")


class AlignError(Exception):
    """An error whose message says what went wrong, where, and what to do about it."""

    exit_code = 2

    def __str__(self) -> str:
        """The message, with overlong words and lists shortened in the middle."""
        text = _LONG_WORD.sub(lambda word: _shortened(word[0], LONGEST_WORD), super().__str__())
        return _shortened(text, LONGEST_MESSAGE)


LONGEST_WORD = 500  # characters; paths are shorter
LONGEST_MESSAGE = 100_000
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def _shortened(text: str, most: int) -> str:
    left = len(text) - most
    ends = (most * 2 // 3, most // 3)
    return f"{text[: ends[0]]}…({left:,} more)…{text[-ends[1] :]}" if left > 0 else text


class UsageError(AlignError):
    """The command, a setting or a path is wrong."""


class BadDataError(AlignError):
    """More rows are unusable than the user allows."""

    exit_code = 3


class FingerprintError(AlignError):
    """The inputs of the cache differ from those of this command."""

    exit_code = 4


class CorruptionError(AlignError):
    """A stored file differs from what its manifest says."""

    exit_code = 5


def damaged(path: object, why: str, remedy: str) -> CorruptionError:
    """The error for a damaged file; `remedy` tells the user what to do."""
    return CorruptionError(f"{path} is damaged: {why}. {remedy}")


class NonFiniteError(AlignError):
    """A computed number is NaN or infinite."""

    exit_code = 6


class PeerError(AlignError):
    """Another rank ended while this one waited for it."""

    exit_code = 69


class MemoryLimitError(AlignError):
    """Memory ran out, and smaller batches cannot help before the next start."""

    exit_code = 71


class ServerError(AlignError):
    """A server gave no usable answer in any attempt, or a cluster failed."""

    exit_code = 69


class StorageError(AlignError):
    """A file operation failed."""

    exit_code = 74


class PathError(StorageError):
    """The path is wrong; the disk itself works."""

    exit_code = 2


class LockedError(AlignError):
    """Another process has locked the output folder."""

    exit_code = 75


class BudgetError(AlignError):
    """The budget that the user set is spent."""

    exit_code = 75


class Interrupted(BaseException):
    """A signal asked the program to stop; a BaseException, so that no handler swallows it."""

    def __init__(
        self, signal_number: int, remedy: str = "Continue with the same command", *, at: str = ""
    ) -> None:
        super().__init__(f"Interrupted by signal {signal_number}{at}. {remedy}.")
        self.signal_number = signal_number
        self.at = at  # the progress, if known
        self.exit_code = 128 + signal_number


def closest(name: str, names: Iterable[str], most: int = 1) -> list[str]:
    """The names most similar to this one, the closest first."""
    return get_close_matches(name, list(names), n=most, cutoff=0.5)


def did_you_mean(near: Iterable[str]) -> str:
    """` Did you mean …?` for the end of a message; empty without close names."""
    listed = " or ".join(map(repr, near))
    return f" Did you mean {listed}?" if listed else ""


def counted(count: int, things: str) -> str:
    """A number and its noun: `1 duplicate row`, `2,000 rows`; `things` is the plural."""
    named = re.sub(r"s\b", "", things, count=1) if count == 1 else things
    return f"{count:,} {named}"


_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_PATH = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EINVAL,
    errno.ENAMETOOLONG,
)


@contextmanager
def os_errors_as_storage_errors(name: str, path: Path, needed: int = 0) -> Iterator[None]:
    """Converts an OSError of the block into a StorageError."""
    try:
        yield
    except OSError as error:
        raise storage_error(name, path, error, needed) from error


def unexpected_os_error(error: OSError) -> StorageError:
    """A StorageError for an OSError that no step expected; a network error names no file."""
    if isinstance(error.filename, str | bytes) and error.filename:
        return storage_error("using it", Path(os.fsdecode(error.filename)), error)
    return StorageError(f"{error.strerror or error}. Fix it, then run the same command again.")


def storage_error(name: str, path: Path, error: OSError, needed: int = 0) -> StorageError:
    """The error for a failed operation on a path, with the reason and what to do."""
    failure = f"{path}: {name.replace('_', ' ')} failed: {error.strerror or error}"
    if error.errno in _FULL:
        needs = f"{needed:,} bytes needed, " if needed else ""
        return StorageError(
            f"{failure} ({needs}{_free_bytes(path.parent)} free). Free some space or choose "
            "another --output, then run the same command again: finished shards are kept."
        )
    if error.errno in _OF_PATH:
        return PathError(f"{failure}. Check the path and its permissions, or choose another.")
    what = "the disk, its server and the limits of this process (ulimit -a)"
    return StorageError(f"{failure}. Check {what}, then run the same command again.")


def _free_bytes(path: Path) -> str:
    try:
        state = os.statvfs(path)
    except OSError:
        return "an unknown number"
    return f"{state.f_bavail * state.f_frsize:,}"


@contextmanager
def log_failure(missing: str) -> Iterator[None]:
    """Logs any failure to write an informational file, and continues."""
    try:
        yield
    except AlignError as error:
        logger.warning("%s: %s", missing, error)
    except Exception as error:
        logger.warning("%s: %s: %s", missing, type(error).__name__, error, exc_info=True)


DIGEST_LENGTH = 64
SHOWN_OF_DIGEST = 12


def differences(
    stored: Mapping[str, str], wanted: Mapping[str, str], *, had: str = "the cache has"
) -> dict[str, str]:
    """A line for each field that differs, by name; `had` introduces the stored value."""
    return {
        name: f"{name}: {had} {_shown(stored, name)}, now {_shown(wanted, name)}"
        for name in sorted({*stored, *wanted})
        if stored.get(name) != wanted.get(name)
    }


# Fields that a cache has only at another value than these.
LEFT_OUT = {"data.wrap": "auto or none", "tokens.learn": "all or no turns"}


def _shown(fields: Mapping[str, str], name: str) -> str:
    """The value, a digest shortened; a field of another format or method is absent."""
    value = fields.get(name, LEFT_OUT.get(name, "nothing"))
    return f"{value[:SHOWN_OF_DIGEST]}…" if len(value) == DIGEST_LENGTH else value
