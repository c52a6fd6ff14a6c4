"""Files on a disk, as a `Store`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ....schemas.errors import CorruptionError, StorageError
from ....schemas.file_version import Remember
from . import fs
from .digests import remembered_sha256

T = TypeVar("T")
U = TypeVar("U")

TRASH = ".trash-"


class DiskStore:
    """Drafts that are renamed or linked; folders that are removed in one step."""

    has_folders = True
    removes_at_once = True
    is_near = True

    put_if_absent = staticmethod(fs.put_if_absent)
    read = staticmethod(fs.read_bytes)
    open = staticmethod(fs.open_file)
    remove = staticmethod(fs.unlink)
    sync_names = staticmethod(fs.fsync_folder)
    remove_if_empty = staticmethod(fs.remove_folder)
    free_bytes = staticmethod(fs.free_bytes)

    @staticmethod
    def replace(
        path: Path,
        payload: bytes,
        *,
        known: bytes | None,  # the owner's lock sees to it
    ) -> None:
        """By a draft that is renamed over the file."""
        fs.publish(path, payload)

    @staticmethod
    def install(draft: Path, target: Path) -> None:
        """By a rename, once its bytes are durable."""
        fs.fsync(draft)
        fs.rename(draft, target)
        fs.fsync_folder(target.parent)

    @staticmethod
    def local(path: Path) -> Path:
        """The file itself."""
        return path

    @staticmethod
    def ahead(paths: Iterable[Path]) -> Iterator[Path]:
        """The paths as they are."""
        yield from paths

    @staticmethod
    def listed(path: Path) -> list[Path]:
        """The paths in a folder, sorted."""
        return sorted(path.iterdir(), key=str)

    @staticmethod
    def each(function: Callable[[U], T], things: Sequence[U]) -> Iterator[T]:
        """One after another."""
        yield from map(function, things)

    @staticmethod
    def size(path: Path) -> int | None:
        """Of the file itself, not of what a link names."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return path.stat(follow_symlinks=False).st_size
        return None

    @staticmethod
    def pinned(path: Path, sha256: str, size: int) -> Path:  # has no copy
        """The path itself."""
        return path

    @staticmethod
    def measure(path: Path, size: int, remember: Remember) -> tuple[int, str]:
        """By its size, and the digest of all its bytes."""
        try:
            found = path.stat().st_size
            return found, remembered_sha256(path, remember) if found == size else ""
        except (OSError, StorageError) as error:
            why = error.__cause__ or error
            raise CorruptionError(f"{path} cannot be opened: {why}.") from error

    measure_read = measure

    @staticmethod
    def retire(path: Path, *, first: str) -> bool:  # all go at once
        """Renames it before it is removed: half a folder must not look like work to be resumed."""
        try:
            fs.rename(path, path.with_name(f"{TRASH}{path.name}-{secrets.token_hex(4)}"))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False  # or another process was first
            raise
        return True

    @staticmethod
    def make_folder(path: Path) -> None:
        """Unless it exists."""
        fs.make_folder(path)
        fs.fsync_folder(path.parent)

    @staticmethod
    def drop_drafts(path: Path, names: Sequence[str]) -> None:
        """By whether a living process has locked them."""
        for name in names:
            fs.drop_drafts(path / name)

    @staticmethod
    def work_folder(path: Path) -> Path:
        """The folder itself."""
        return path

    @staticmethod
    def folder_beside(path: Path) -> Path:
        """The folder it is in."""
        return path.resolve().parent

    @staticmethod
    def is_within(path: Path, folder: Path) -> bool:
        """By its absolute path."""
        return path.absolute().is_relative_to(folder)
