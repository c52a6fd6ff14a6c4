"""A run's folder in an object store: what it saved is uploaded, and any machine resumes from there.

checkpoints/step-<n>.json      the record of a whole checkpoint, written after all of its files
checkpoints/files/<sha256>     the files of checkpoints, named by their content
model/, model-merged/          the trained model; _align/model.json lists its files, and is later
metrics.jsonl, report.html, …  as in the folder of a run
_align/ending.json             how it ended; the last of all

The run itself works in a local folder.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ....schemas.checkpoint import Checkpoint, CheckpointFile
from ....schemas.errors import CorruptionError, UsageError
from ....schemas.json_codec import to_signed_json
from ..bucket import local_copies, objects
from ..bucket.objects import ObjectPath, location, object_at
from ..disk import fs
from ..disk.locks import held
from ..signed_records import SignedRecords
from ..store import store_of
from .checkpoints import CHECKPOINTS, read_checkpoint, write_record
from .run_folder import RECORD_NAME, RunFolder, described, trash_name

logger = logging.getLogger("align")

_COMMIT = re.compile(r"step-([0-9]{8,})\.json")
_MODELS = ("model", "model-merged")
_OURS = {
    *("metrics.jsonl", "nonfinite.jsonl", "evaluations", "rows.parquet"),
    *("answers.jsonl", "report.html", "config.yaml", "deepspeed.json"),
    *("checkpoints", "_align", *_MODELS),
}


def run_folder_of(output: str) -> RunFolder:
    """The folder that a run works in: its output, or one on this machine if that is in a store."""
    root = location(output)
    return RunFolder(store_of(root).work_folder(root))


def run_store_of(output: str) -> RunStore | None:
    """Where a run is uploaded; None if its output is on a disk."""
    root = object_at(output)
    return RunStore(root, run_folder_of(output)) if root else None


@dataclass(frozen=True)
class StoredModel:
    """The files of a trained model in a store."""

    files: tuple[CheckpointFile, ...]


_STORED_MODELS = SignedRecords(StoredModel, remedy="Train again, or restore it.")


@dataclass(frozen=True)
class RunStore:
    """A run in a store, and the folder it works in on this machine."""

    root: ObjectPath
    folder: RunFolder

    def require_new(self) -> None:
        """Refuses to begin a run where one is."""
        self._refuse_foreign()
        if self.root.is_dir():
            raise UsageError(
                f"{self.root} holds a run. Continue it with --resume auto, or choose another "
                "--output."
            )

    def pull(self) -> None:
        """Brings the folder to what the store has; of the ranks of a machine one does it."""
        self._refuse_foreign()
        with held(self.folder.private / "PULL"):
            fs.make_folder(self.folder.checkpoints)
            commits = self._commits()
            is_behind = max(commits, default=-1) > max(self.folder.steps(), default=-1)
            if is_behind or not self.folder.metrics.exists():
                self._pull_records()
            for step, path in sorted(commits.items()):
                self._pull_checkpoint(step, path)
            if not self.folder.model.exists():
                self._pull_model()

    def push(self) -> None:
        """Uploads what is new, each commit after what it names; what was removed goes last."""
        if not self.folder.metrics.exists():
            return  # it ended before it measured anything
        ending = self.root / "_align" / "ending.json"
        if not self.folder.ending.exists():
            objects.remove(ending)  # the run goes on
        for path in self._records():
            objects.put(self.root / path.relative_to(self.folder.root).as_posix(), path)
        self._drop_outdated()
        steps, stored = self.folder.steps(), self._commits()
        held = {path.name for path in self._files.iterdir()}
        named = set[str]()
        for step in steps:
            named |= self._push_checkpoint(step, held)
        for step in set(stored) - set(steps):
            objects.remove(stored[step])  # before its files: a commit names none that is missing
        for name in held - named:
            objects.remove(self._files / name)
        self._push_model()
        if self.folder.ending.exists():
            objects.put(ending, self.folder.ending)

    def _drop_outdated(self) -> None:
        """Removes rows of steps that were trained again, and what an earlier model answered."""
        for page in (self.folder.answers, self.folder.rows):
            if not page.exists():
                objects.remove(self.root / page.name)
        kept = {path.name for path in self.folder.rows_written()}
        stored = self.root / self.folder.row_parts.relative_to(self.folder.root).as_posix()
        for path in stored.iterdir():
            if path.name not in kept:
                objects.remove(path)

    @property
    def _files(self) -> ObjectPath:
        return self.root / "checkpoints" / "files"

    def _commits(self) -> dict[int, ObjectPath]:
        """The whole checkpoints in the store, by step."""
        found = {path: _COMMIT.fullmatch(path.name) for path in self._files.parent.iterdir()}
        return {int(name[1]): path for path, name in found.items() if name}

    def _records(self) -> Iterator[Path]:
        folder = self.folder
        yield from folder.records()
        yield from (page for page in (folder.rows, *folder.pages) if page.exists())
        yield from folder.rows_written()
        yield from folder.ledgers()
        yield from sorted(path for path in folder.copies.glob("[!.]*") if path.is_file())

    def _pull_records(self) -> None:
        fs.unlink(self.folder.ending)  # of what this machine had; the store has its own, if any
        models = tuple(f"{name}/" for name in ("checkpoints", *_MODELS))
        start, pulled = len(self.root.key) + 1, set[Path]()
        for key in objects.below(self.root):
            name = key[start:]
            if name.startswith(models):
                continue
            target = self._target(name)
            fs.publish(target, objects.read(self.root / name), label="config")
            pulled.add(target)
        for path in self.folder.rows_written().keys() - pulled:
            fs.unlink(path)  # of steps that another machine has trained anew

    def _target(self, name: str) -> Path:
        """A path in the folder, its parents made."""
        parts = name.split("/")
        for depth in range(1, len(parts)):
            fs.make_folder(self.folder.root.joinpath(*parts[:depth]))
        return self.folder.root.joinpath(*parts)

    def _pull_checkpoint(self, step: int, path: ObjectPath) -> None:
        checkpoint = CHECKPOINTS.read(path)
        final = self.folder.step(step)
        if final.exists():
            if _has(final, checkpoint):
                return
            fs.rename(final, trash_name(final))
        draft = self.folder.draft(step, "pulled")
        if draft.exists():
            fs.remove_tree(draft)
        fs.make_folder(draft)
        for file in checkpoint.files:
            target = self._target(f"checkpoints/{draft.name}/{file.path}")
            _download((self._files / file.sha256).pinned(file.sha256, file.bytes), target)
        write_record(draft, checkpoint)
        fs.rename(draft, final)
        fs.fsync_folder(self.folder.checkpoints)
        fs.publish(self.folder.latest, f"{final.name}\n".encode(), label="latest")

    def _push_checkpoint(self, step: int, held: set[str]) -> set[str]:
        """Uploads a checkpoint unless it is there; returns the names of its files."""
        source = self.folder.step(step)
        files = read_checkpoint(source).files
        for file in files:
            if file.sha256 not in held:
                objects.put(self._files / file.sha256, source / file.path)
                held.add(file.sha256)
        commit = self._files.parent / f"{source.name}.json"
        record = fs.read_bytes(source / RECORD_NAME)
        if not objects.put_new(commit, record):
            # Of this run at an earlier time: its metrics were added, or it was saved again.
            objects.put_over(commit, record, expected=objects.read(commit))
        return {file.sha256 for file in files}

    def _pull_model(self) -> None:
        listed = self.root / "_align" / "model.json"
        model = _STORED_MODELS.find(listed)
        for file in model.files if model else ():
            _download(
                (self.root / file.path).pinned(file.sha256, file.bytes), self._target(file.path)
            )

    def _push_model(self) -> None:
        listed, root = self.root / "_align" / "model.json", self.folder.root
        folders = [root / name for name in _MODELS if (root / name).is_dir()]
        paths = sorted(path for one in folders for path in one.rglob("*") if path.is_file())
        model = StoredModel(tuple(described(root, path) for path in paths))
        payload, seen = to_signed_json(model).encode(), objects.look(listed)
        if not paths or (seen and seen.content == payload):
            return
        objects.remove(listed)
        for path in paths:
            objects.put(self.root / path.relative_to(root).as_posix(), path)
        objects.put(listed, payload)

    def _refuse_foreign(self) -> None:
        if foreign := {path.name for path in self.root.iterdir()} - _OURS:
            raise UsageError(
                f"{self.root} holds '{min(foreign)}' and is not a training run. Choose another "
                "--output."
            )


def _has(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint on disk has these files; its metrics may be newer."""
    try:
        return read_checkpoint(folder).files == checkpoint.files
    except CorruptionError:
        return False


def _download(path: ObjectPath, target: Path) -> None:
    with fs.new_file(target, replaces=True) as sink:
        local_copies.receive(path, sink)
