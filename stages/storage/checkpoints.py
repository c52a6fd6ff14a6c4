"""How a checkpoint is saved: all files durable and vouched for, then one rename that counts.

Every rank writes into one draft folder and vouches for its own files; rank 0 compares what is
there with what was vouched for, adds the record, and gives the folder its name.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from ... import __version__
from ...schemas.checkpoint import FORMAT_VERSION, Checkpoint, CheckpointFile, RankFiles, Saved
from ...schemas.errors import AlignError, StorageError
from ...schemas.json_codec import digest_of, to_json
from . import fs
from .failpoints import reach
from .retention import empty_trash, prune
from .run_folder import RECORD_NAME, trash_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from ...schemas.checkpoint import Peers, Position, Retention
    from .run_folder import RunFolder


def save_checkpoint(
    folder: RunFolder,
    position: Position,
    write: Callable[[Path], Iterable[str]],
    *,
    run_id: str,
    peers: Peers,
    retention: Retention,
) -> Saved:
    """Saves together with all other ranks; where one of them fails, there is no checkpoint.

    `write` fills the folder it is given and returns the relative paths of this rank's own files.
    """
    draft = folder.draft(position.global_step, run_id)
    shares = peers.gather(_write_share(draft, write))
    failure = ""
    if peers.rank == 0:
        failure = _finish(folder, draft, position, shares, retention)
    return Saved(position.global_step, peers.gather(failure)[0])


def _write_share(draft: Path, write: Callable[[Path], Iterable[str]]) -> RankFiles:
    """Never raises what a disk may cause: the other ranks would wait for this one."""
    try:
        fs.make_folder(draft)
        names = sorted(write(draft))
        reach("checkpoint.written")
        return RankFiles(tuple(_vouch(draft, name) for name in names))
    except (AlignError, OSError, RuntimeError) as error:  # a full disk is torch's RuntimeError
        said = str(error).partition("\n")[0]
        return RankFiles((), said or type(error).__name__)


def _vouch(draft: Path, name: str) -> CheckpointFile:
    path = draft / name
    fs.fsync(path)
    return CheckpointFile(name, path.stat(follow_symlinks=False).st_size, fs.sha256_of(path))


def _finish(
    folder: RunFolder,
    draft: Path,
    position: Position,
    shares: Sequence[RankFiles],
    retention: Retention,
) -> str:
    """Commits, and prunes what is no longer kept; returns why it could not."""
    try:
        _require_all(draft, shares)
        _commit(folder, draft, position, shares)
        prune(folder, retention, newest=position.global_step)
    except StorageError as error:
        _abandon(folder, draft)
        return str(error)
    return ""


def _require_all(draft: Path, shares: Sequence[RankFiles]) -> None:
    failures = [f"rank {rank}: {share.failure}" for rank, share in enumerate(shares)]
    if failed := [said for said, share in zip(failures, shares, strict=True) if share.failure]:
        raise StorageError("; ".join(failed))
    vouched = [(file.path, file.bytes) for share in shares for file in share.files]
    found = [
        (path.relative_to(draft).as_posix(), path.stat(follow_symlinks=False).st_size)
        for path in draft.rglob("*")
        if not path.is_dir() or path.is_symlink()
    ]
    if odd := sorted(set(vouched) ^ set(found)):
        raise StorageError(f"{draft}: not what the ranks wrote: {odd[0][0]} ({odd[0][1]} bytes).")
    if len(set(vouched)) < len(vouched):
        raise StorageError(f"{draft}: two ranks wrote the same file.")


def _commit(
    folder: RunFolder, draft: Path, position: Position, shares: Sequence[RankFiles]
) -> None:
    finite = {name: value for name, value in position.metrics.items() if math.isfinite(value)}
    files = sorted((file for share in shares for file in share.files), key=lambda file: file.path)
    unsigned = Checkpoint(
        format_version=FORMAT_VERSION,
        align_version=__version__,
        digest="",
        position=dataclasses.replace(position, metrics=finite),
        files=tuple(files),
    )
    record = dataclasses.replace(unsigned, digest=digest_of(unsigned, "digest"))
    reach("checkpoint.before_json")
    fs.write_new(draft / RECORD_NAME, to_json(record).encode())
    for path in (*(path for path in draft.rglob("*") if path.is_dir()), draft):
        fs.fsync_folder(path)
    final = folder.step(position.global_step)
    if final.exists():  # of a future that was left for an older checkpoint
        fs.rename(final, trash_name(final))
    reach("checkpoint.before_rename")
    fs.rename(draft, final)
    reach("checkpoint.after_rename")
    fs.fsync_folder(folder.checkpoints)
    fs.publish(folder.latest, f"{final.name}\n".encode(), label="latest")


def _abandon(folder: RunFolder, draft: Path) -> None:
    with suppress(StorageError):  # the next start sweeps up
        if draft.exists():
            fs.rename(draft, trash_name(draft))
        empty_trash(folder)
