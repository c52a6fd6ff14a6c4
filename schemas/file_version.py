"""The version of a file on disk, and digests that are computed once per version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

# Returns the digests of a file: those stored for this version, or newly computed ones.
Remember: TypeAlias = Callable[[Path, Callable[[], list[str]]], list[str]]


@dataclass(frozen=True)
class FileVersion:
    """The metadata of a file that change when it is modified or replaced."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int  # ctime, which programs cannot set

    @staticmethod
    def of(file: Path) -> FileVersion:
        """The current version of a file; zeros if there is no file."""
        try:
            found = file.stat()
        except FileNotFoundError:
            return FileVersion(0, 0, 0, 0, 0)
        return FileVersion(
            found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        )

    def is_content_of(self, other: FileVersion) -> bool:
        """Whether both have the same content; link count, owner and mode may differ."""
        return self.inode == other.inode and (self.size, self.modified_ns) == (
            other.size,
            other.modified_ns,
        )


def digest_anew(_: Path, digest: Callable[[], list[str]]) -> list[str]:
    """The digests, computed without storing them."""
    return digest()
