"""What to tell a person when the system refuses a file, in the words of its kind."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.errors import PathError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What is no fault of the disk, and what to do about it.
_RIGHTS = "Give this user the right to it, or choose another path"
_WAYS_ON = {
    errno.ENOENT: "See that the path is right and that nothing removes it",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "This file system is read-only: choose a path on another one",
    errno.EISDIR: "It has to be a file: remove the folder, or choose another path",
    errno.ENOTDIR: "A part of the path is a file: choose another path",
    errno.EEXIST: "Move what is there, or choose another path",
    errno.ELOOP: "Links are not followed here: name the file itself",
    errno.EINVAL: "It has to be a plain file: choose another path",
    errno.ENAMETOOLONG: "Choose a shorter path",
}
_FILES = "Raise the limit on open files (ulimit -n)"
_SCARCE = {
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: "Free some memory",
    errno.ENOLCK: "Choose a path on a file system with locks",
    errno.ESTALE: "The network file system lost the file: see to its server",
    errno.ETIMEDOUT: "The network file system does not answer: see to its server",
    errno.EFBIG: "The file system or a limit (ulimit -f) allows no file of this size: raise it",
}


@contextmanager
def told(name: str, path: Path, needed: int = 0) -> Iterator[None]:
    """Turns what the disk refuses inside into a StorageError."""
    try:
        yield
    except OSError as error:
        raise storage_error(name, path, error, needed) from error


def refused(error: OSError) -> StorageError:
    """What no step of ours expected; an error of a network names no file."""
    if isinstance(error.filename, str | bytes) and error.filename:
        return storage_error("using it", Path(os.fsdecode(error.filename)), error)
    return StorageError(f"{error.strerror or error}. Mend that, then run the same command again.")


def storage_error(name: str, path: Path, error: OSError, needed: int = 0) -> StorageError:
    """What to tell a person when the disk refuses."""
    said = f"{path}: {name.replace('_', ' ')} failed: {error.strerror or error}"
    if error.errno in _FULL:
        needs = f"{needed:,} bytes needed, " if needed else ""
        return StorageError(
            f"{said} ({needs}{_room(path.parent)} free). Free some space or choose another "
            "--output, then run the same command again: finished shards are kept."
        )
    if error.errno in _WAYS_ON:
        return PathError(f"{said}. {_WAYS_ON[error.errno]}, then run the same command again.")
    if error.errno in _SCARCE:
        return StorageError(f"{said}. {_SCARCE[error.errno]}, then run the same command again.")
    return StorageError(f"{said}. Check the disk, then run the same command again.")


def _room(path: Path) -> str:
    try:
        state = os.statvfs(path)
    except OSError:
        return "an unknown number"
    return f"{state.f_bavail * state.f_frsize:,}"
