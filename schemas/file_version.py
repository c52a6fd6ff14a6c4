"""The version of a file on disk, and digests that are made once for each version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

# Returns the digests of a file: those remembered of this version, or what the function makes now.
Remember: TypeAlias = Callable[[Path, Callable[[], list[str]]], list[str]]

# A file system may tell times in steps of two seconds: a file that was changed less than that
# before it was digested may be changed once more and keep its time.
SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class FileVersion:
    """What differs between a file and a changed or replaced one."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int  # no program can set it back

    @staticmethod
    def of(file: Path) -> FileVersion:
        """The version that is there now; zeros where there is no file."""
        try:
            found = file.stat()
        except FileNotFoundError:
            return FileVersion(0, 0, 0, 0, 0)
        return FileVersion(
            found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        )

    def is_content_of(self, other: FileVersion) -> bool:
        """Whether both are one content; a new link, owner or mode is not a change of that."""
        return self.inode == other.inode and (self.size, self.modified_ns) == (
            other.size,
            other.modified_ns,
        )

    def is_settled(self, now_ns: int) -> bool:
        """Whether every change from now on will show in the version."""
        return now_ns - max(self.modified_ns, self.changed_ns) >= SETTLED_NS


def digest_anew(_: Path, digest: Callable[[], list[str]]) -> list[str]:
    """Remembers nothing."""
    return digest()
