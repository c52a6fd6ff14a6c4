"""How a run ended, written down in its folder, and whether its files are those that it left."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

from ...schemas.checkpoint import CheckpointFile, Ending
from ...schemas.errors import CorruptionError, told
from ...schemas.json_codec import CodecError, from_signed_json, to_signed_json
from . import fs

if TYPE_CHECKING:
    from pathlib import Path

    from .run_folder import RunFolder

CHUNK = 1 << 20


def write_ending(folder: RunFolder, ending: Ending) -> None:
    """The last word of a run; it vouches for what was measured."""
    paths = (folder.metrics, folder.nonfinite, folder.config, folder.engine)
    files = [path for path in (*paths, *folder.evaluations().values()) if path.exists()]
    vouching = dataclasses.replace(
        ending, files=tuple(described(folder.root, path) for path in files)
    )
    fs.publish(folder.ending, to_signed_json(vouching).encode(), label="ending")


def forget_ending(folder: RunFolder) -> None:
    """The run goes on: until it ends again nothing says that it has."""
    if folder.ending.exists():
        fs.unlink(folder.ending)
        fs.fsync_folder(folder.private)


def read_ending(folder: RunFolder) -> Ending | None:
    """How the run ended; None where it did not, or where it was killed.

    CorruptionError where a file is not as the run left it. One that was removed is no damage: it
    is missed where it is needed.
    """
    if not folder.ending.exists():
        return None
    try:
        ending = from_signed_json(Ending, fs.read_bytes(folder.ending))
    except CodecError as error:
        raise _damaged(folder, folder.ending, str(error)) from error
    for file in ending.files:
        path = folder.root / file.path
        if path.exists() and described(folder.root, path) != file:
            raise _damaged(folder, path, "it is not what the run left there")
    return ending


def described(root: Path, path: Path) -> CheckpointFile:
    """A file as it is now: its name below a folder, its length and its digest."""
    size = path.stat(follow_symlinks=False).st_size
    return CheckpointFile(path.relative_to(root).as_posix(), size, fs.sha256_of(path))


def begins_as(path: Path, known: CheckpointFile) -> bool:
    """Whether a file begins with the bytes that it had when it was described."""
    sha256, left = hashlib.sha256(), known.bytes
    with fs.open_regular(path) as source, told("read", path):
        while left and (chunk := source.read(min(left, CHUNK))):
            sha256.update(chunk)
            left -= len(chunk)
    return not left and sha256.hexdigest() == known.sha256


def _damaged(folder: RunFolder, path: Path, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path} is damaged: {why}. Restore it from a copy, or remove {folder.ending}: the run "
        "then counts as one that was killed, and --resume auto goes on from its last checkpoint."
    )
