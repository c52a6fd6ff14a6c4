"""Which checkpoint to go on from: the one `latest` names if it is whole, else the newest whole one.

One rank chooses for all: ranks that looked for themselves could find different ones.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn

from ...schemas.checkpoint import FORMAT_VERSION, Checkpoint, Chosen
from ...schemas.errors import CorruptionError, FingerprintError, StorageError
from ...schemas.json_codec import digest_of, from_json, to_json, version_in
from . import fs
from .run_folder import RECORD_NAME, STEP_NAME

if TYPE_CHECKING:
    from ...schemas.checkpoint import CheckpointFile
    from .run_folder import RunFolder

logger = logging.getLogger("align")


def choose_checkpoint(folder: RunFolder) -> Chosen | None:
    """Reads every byte of the newest checkpoint, and of older ones as long as it is damaged."""
    set_aside: list[str] = []
    for step in _in_order(folder):
        path = folder.step(step)
        try:
            checkpoint = verify_checkpoint(path)
        except CorruptionError as error:
            bad = path.with_name(f".bad-{path.name}-{secrets.token_hex(4)}")
            fs.rename(path, bad)
            logger.warning("%s It is now called %s; an older one is tried.", error, bad.name)
            set_aside.append(bad.name)
            continue
        return Chosen(checkpoint, tuple(set_aside))
    return None


def verify_checkpoint(path: Path) -> Checkpoint:
    """The record of a checkpoint that is whole; CorruptionError where a byte or a file is not."""
    checkpoint = read_checkpoint(path)
    missing = {file.path: file for file in checkpoint.files}
    for folder, folders, names, descriptor in os.fwalk(path, onerror=_cannot_list):
        prefix = PurePosixPath(Path(folder).relative_to(path).as_posix())
        for name in [*names, *(name for name in folders if _is_link(name, descriptor))]:
            relative = str(prefix / name)
            if relative == RECORD_NAME:
                continue
            if relative not in missing:
                raise _damaged(path, f"{relative!r} is no file of it")
            _check(path, descriptor, name, missing.pop(relative))
    if missing:
        raise _damaged(path, f"{next(iter(missing))} is missing")
    return checkpoint


def read_checkpoint(path: Path) -> Checkpoint:
    """What a checkpoint says about itself; its files are not looked at."""
    try:
        text = fs.read_bytes(path / RECORD_NAME)
    except StorageError as error:
        raise _damaged(path, f"{RECORD_NAME} cannot be read: {error.__cause__}") from error
    _refuse_another_format(text, path)
    try:
        checkpoint = from_json(Checkpoint, text)
        is_ours = to_json(checkpoint).encode() == text
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not is_ours or checkpoint.digest != digest_of(checkpoint, "digest"):
        raise _damaged(path, f"{RECORD_NAME} was edited")
    name = STEP_NAME.fullmatch(path.name)
    if name is None or int(name[1]) != checkpoint.position.global_step:
        raise _damaged(path, f"it is of step {checkpoint.position.global_step}")
    paths = [file.path for file in checkpoint.files]
    if paths != sorted(set(paths)) or not all(map(_is_plain, paths)):
        raise _damaged(path, f"{RECORD_NAME} names files that cannot be")
    return checkpoint


def latest_step(folder: RunFolder) -> int | None:
    """The step that `latest` names, whether it is there or not."""
    try:
        text = fs.read_bytes(folder.latest).decode("ascii", "replace")
    except StorageError:
        return None
    name = STEP_NAME.fullmatch(text.strip())
    return int(name[1]) if name else None


def _in_order(folder: RunFolder) -> list[int]:
    steps = folder.steps()[::-1]
    named = latest_step(folder)
    if named in steps:
        return [named, *(step for step in steps if step != named)]
    if steps:
        logger.warning("%s names no checkpoint that is there; the newest is tried.", folder.latest)
    return steps


def _check(path: Path, descriptor: int, name: str, expected: CheckpointFile) -> None:
    try:
        source = fs.open_regular(Path(name), folder=descriptor)
    except StorageError as error:
        raise _damaged(path, f"{expected.path} cannot be opened: {error.__cause__}") from error
    with source:
        found = os.fstat(source.fileno()).st_size
        if found != expected.bytes:
            raise _damaged(path, f"{expected.path} has {found} bytes, not {expected.bytes}")
        if fs.sha256_of_open(source, path / expected.path) != expected.sha256:
            raise _damaged(path, f"{expected.path} is not what was written (sha256 differs)")


def _is_link(name: str, descriptor: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)


def _is_plain(path: str) -> bool:
    """Whether a path stays inside its folder on every system."""
    parts = path.split("/")
    return not {"", ".", ".."} & {*parts} and path.isprintable() and "\\" not in path


def _refuse_another_format(text: bytes, path: Path) -> None:
    version = version_in(text)
    if version is not None and version != FORMAT_VERSION:
        newer_or_older = "a newer" if version > FORMAT_VERSION else "the older"
        raise FingerprintError(
            f"{path} has format version {version}; this align goes on from {FORMAT_VERSION} only. "
            f"Install {newer_or_older} align, or begin a new run in another --output."
        )


def _cannot_list(error: OSError) -> NoReturn:
    raise CorruptionError(f"{error.filename} cannot be listed: {error.strerror}.") from error


def _damaged(path: Path, why: str) -> CorruptionError:
    return CorruptionError(f"The checkpoint {path} is damaged: {why}.")
