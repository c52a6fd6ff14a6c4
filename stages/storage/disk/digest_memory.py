"""Digests of files, remembered for each user, and believed as long as a file stays the same.

Each folder of digested files has one file of lines; a line holds a file's name, its version and its
digests, behind a checksum of all that. Any number of processes append to it; the last line counts,
and one that is cut or damaged is passed over. A line that is lost costs a digest, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from ....schemas.errors import StorageError
from ....schemas.file_version import FileVersion, Remember
from . import fs
from .lines import Lines, read_lines

logger = logging.getLogger("align")

CHECKSUM_DIGITS = 16


def user_folder() -> Path:
    """Where this user's list of caches and remembered digests are."""
    named = os.environ.get("ALIGN_HOME")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "align"


@dataclass(frozen=True)
class _Line:
    version: FileVersion
    digests: list[str]


class DigestMemory:
    """The digests that a user's commands have made; a call returns those of one file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, dict[str, _Line]] = {}  # by the folder of the digested files
        self._has_warned = False

    def __call__(self, file: Path, compute: Callable[[], list[str]]) -> list[str]:
        """The digests of this version of a file: remembered, or as `compute` makes them now."""
        lines = self._lines(file.parent)
        before, now_ns = FileVersion.of(file), time.time_ns()
        known = lines.get(file.name)
        if known and known.version == before:
            return known.digests
        digests = compute()
        if before.is_settled(now_ns) and FileVersion.of(file) == before:
            lines[file.name] = _Line(before, digests)
            self._append(file, lines[file.name])
        return digests

    def _lines(self, parent: Path) -> dict[str, _Line]:
        if parent not in self._read:
            self._read[parent] = _parsed(self._file_of(parent))
        return self._read[parent]

    def _file_of(self, parent: Path) -> Path:
        name = hashlib.sha256(os.fsencode(parent.resolve())).hexdigest()[:32]
        return self._folder / "digests" / f"{name}.txt"

    def _append(self, file: Path, line: _Line) -> None:
        text = json.dumps([file.name, *astuple(line.version), line.digests])
        kept = self._file_of(file.parent)
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with closing(Lines(kept)) as lines:
                # The first newline ends a line that was cut off.
                lines.append(f"\n{_checksum(text)} {text}".encode())
        except (OSError, StorageError) as error:
            if not self._has_warned:
                why = error.__cause__ or error
                logger.warning("%s: digests are not remembered: %s", kept.parent, why)
            self._has_warned = True


def own_digests() -> DigestMemory:
    """The memory that all commands of this user share."""
    return DigestMemory(user_folder())


def remembered_sha256(path: Path, remember: Remember) -> str:
    """The digest of a file's bytes."""
    (sha256,) = remember(path, lambda: [fs.sha256_of(path)])
    return sha256


def _parsed(file: Path) -> dict[str, _Line]:
    found: dict[str, _Line] = {}
    with suppress(StorageError):  # nothing has been remembered
        for line in read_lines(file):
            checksum, _, content = line.text[:-1].decode(errors="replace").partition(" ")
            if checksum and checksum == _checksum(content):
                name, *version, digests = json.loads(content)
                found[name] = _Line(FileVersion(*version), digests)
    return found


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:CHECKSUM_DIGITS]
