"""A run whose --output is in a bucket: it works in a local folder and uploads its files.

The bucket holds the same files under the same names as the folder of a run. A checkpoint's
`align_checkpoint.json` is written after its other files and removed before them, and
`_align/ending.json` is written last of all. Any machine can resume from the bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from ....schemas.checkpoint import Checkpoint
from ....schemas.errors import CorruptionError, UsageError, damaged, log_failure
from ....schemas.json_codec import CodecError, from_signed_json
from ..disk import fs
from ..disk.locks import locked
from ..remote import Remote, Version
from .checkpoints import read_checkpoint, whole_checkpoints
from .run_folder import RECORD_NAME, RunFolder, run_folder_of, trash_name

MODELS = ("model", "model-merged")
OURS = {
    "metrics.jsonl",
    "nonfinite.jsonl",
    "evaluations",
    "rows.parquet",
    "answers.jsonl",
    "report.html",
    "config.yaml",
    "deepspeed.json",
    "checkpoints",
    "_align",
    *MODELS,
}
RECORD = re.compile(rf"checkpoints/step-[0-9]{{8,}}/{re.escape(RECORD_NAME)}")
ENDING = "_align/ending.json"
LOCAL = ("_align/LOCK", "_align/PULL", "checkpoints/latest")


def run_remote_of(output: str) -> RunRemote:
    """The run in a bucket."""
    return RunRemote(Remote(output), run_folder_of(output))


class RunRemote:
    """A run in a bucket, and its work folder on this machine."""

    def __init__(self, remote: Remote, folder: RunFolder) -> None:
        self.remote = remote
        self.folder = folder
        self._pushed: dict[str, tuple[int, int, int]] = {}  # inode, size and time of each file

    def require_new(self) -> None:
        """Refuses to start a run where one exists."""
        if self._listed():
            raise UsageError(
                f"{self.remote.url} holds a run. Continue it with --resume auto, or choose another "
                "--output."
            )

    @contextmanager
    def pushed_at_end(self) -> Iterator[None]:
        """Uploads the run at the end of the block; a failure hides no error of the block."""
        try:
            yield
        except BaseException:
            with log_failure("Not all of the run was uploaded"):
                self.push()
            raise
        self.push()

    def push(self) -> None:
        """Uploads the files that changed, then deletes objects whose files are gone."""
        folder = self.folder
        if not folder.metrics.exists():
            return  # the run ended before it measured anything
        stored = self._listed()
        if not folder.ending.exists():
            self.remote.delete({ENDING} & stored.keys())  # the run was resumed
        files = dict(self._files())
        for name, path in files.items():
            if not name.startswith("checkpoints/"):
                self._push_file(name, path)
        for checkpoint in whole_checkpoints(folder):
            self._push_checkpoint(folder.step(checkpoint.state.step), checkpoint)
        gone = {name for name in stored.keys() - files.keys() if name != ENDING}
        records = {name for name in gone if name.endswith(RECORD_NAME)}
        self.remote.delete(records)
        self.remote.delete(gone - records)
        if folder.ending.exists():
            self._push_file(ENDING, folder.ending)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """The files to upload, except `_align/ending.json`."""
        for path in sorted(self.folder.root.rglob("*")):
            name = path.relative_to(self.folder.root).as_posix()
            is_draft = "/." in f"/{name}"
            if path.is_file() and not is_draft and name not in (*LOCAL, ENDING):
                yield name, path

    def _push_file(self, name: str, path: Path) -> None:
        if self._pushed.get(name) != _state(path):
            self.remote.put(name, path)
            self._pushed[name] = _state(path)

    def _push_checkpoint(self, source: Path, checkpoint: Checkpoint) -> None:
        name, record = f"checkpoints/{source.name}/{RECORD_NAME}", source / RECORD_NAME
        if self._pushed.get(name) == _state(record):
            return
        stored = self.remote.get(name)
        if stored is None or not _is_of(stored, checkpoint):
            # The bucket has no such checkpoint, or an earlier one of this run.
            self.remote.delete([] if stored is None else [name])
            for file in checkpoint.files:
                self.remote.put(f"checkpoints/{source.name}/{file.path}", source / file.path)
        self._push_file(name, record)

    def pull(self) -> None:
        """Makes the folder equal to the bucket; one rank of a machine does it."""
        folder, stored = self.folder, self._listed()
        records = [name for name in stored if RECORD.fullmatch(name)]
        with locked(folder.private / "PULL"):
            fs.make_folder(folder.checkpoints)
            newest = max((PurePosixPath(name).parts[1] for name in records), default="")
            is_behind = newest > max(
                (folder.step(step).name for step in folder.steps()), default=""
            )
            if is_behind or not folder.metrics.exists():
                self._pull_records(stored)
            pulled = [self._pull_checkpoint(name) for name in records]
            if any(pulled):
                latest = folder.step(folder.steps()[-1])
                fs.publish(folder.latest, f"{latest.name}\n".encode())
            if ENDING in stored:  # otherwise its models may be half uploaded
                models = [name for name in MODELS if not (folder.root / name).exists()]
                for model in models:
                    names = [name for name in stored if name.startswith(f"{model}/")]
                    self.remote.fetch_all({name: folder.root / f".tmp-{name}" for name in names})
                    if names:
                        fs.rename(folder.root / f".tmp-{model}", folder.root / model)

    def _pull_records(self, stored: Iterable[str]) -> None:
        folder = self.folder
        fs.unlink(folder.ending)  # this machine's; the bucket may have its own
        apart = tuple(f"{name}/" for name in ("checkpoints", *MODELS))
        targets = {name: folder.root / name for name in stored if not name.startswith(apart)}
        self.remote.fetch_all(targets)
        for path in {*folder.rows_written()} - {*targets.values()}:
            fs.unlink(path)  # of steps that another machine trained again

    def _pull_checkpoint(self, name: str) -> bool:
        """Fetches a checkpoint unless this machine has it; returns whether it was fetched."""
        payload = self.remote.get(name) or b""
        try:
            checkpoint = from_signed_json(Checkpoint, payload)
        except CodecError as error:
            raise damaged(self.remote.at(name), str(error), "Remove it, or restore it.") from error
        prefix = name.removesuffix(f"/{RECORD_NAME}")
        final = self.folder.root / prefix
        if final.exists():
            with suppress(CorruptionError):
                if read_checkpoint(final).files == checkpoint.files:  # its metrics may be newer
                    return False
            fs.rename(final, trash_name(final))
        draft = final.with_name(f".tmp-{final.name}-pulled")
        fs.remove_tree(draft)
        targets = {f"{prefix}/{file.path}": draft / file.path for file in checkpoint.files}
        digests = {f"{prefix}/{file.path}": file.sha256 for file in checkpoint.files}
        self.remote.fetch_all(targets, sha256=digests)
        fs.write_new(draft / RECORD_NAME, payload)
        fs.rename(draft, final)
        fs.fsync(final.parent)
        return True

    def _listed(self) -> dict[str, Version]:
        """The objects of the run; refuses a location with other content."""
        stored = self.remote.list()
        if foreign := {name.partition("/")[0] for name in stored} - OURS:
            raise UsageError(
                f"{self.remote.url} holds '{min(foreign)}' and is not a training run. Choose "
                "another --output."
            )
        return stored


def _state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_of(stored: bytes, checkpoint: Checkpoint) -> bool:
    """Whether a stored record lists the files of this checkpoint; its metrics may differ."""
    try:
        return bool(from_signed_json(Checkpoint, stored).files == checkpoint.files)
    except CodecError:
        return False
