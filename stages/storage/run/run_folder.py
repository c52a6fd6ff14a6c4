"""The layout of the folder of a training run.

metrics.jsonl                   one line per logged step
nonfinite.jsonl                 rows of the steps that gave NaN or infinity, if there were any
evaluations/step-<n>.csv        single held-out completions, a line each
rows.parquet                    the margin of each training row at each visit
answers.jsonl                   held-out prompts, answered before training and after
report.html                     all of this on one page
config.yaml                     the settings it began with
deepspeed.json                  what DeepSpeed was given
checkpoints/step-<n>/           whole checkpoints; `latest` names the newest
checkpoints/fitted              micro-batches that did not fit on several ranks, and that do
checkpoints/.tmp-<n>-<run id>/  one that is being written; .trash-…: one that is being removed
model/                          the trained policy of a finished run
model-merged/                   an adapter's policy with the adapter merged into it
_align/LOCK                     held by the process that trains here
_align/ending.json              how it ended; missing while it runs, or after a kill
_align/mlflow.json              what MLflow has to be sent
_align/trackers/<name>.json     what another tracker has to be sent
_align/rows/                    parts of rows.parquet, by the last step and the rank of each
_align/artifacts/               copies of files from elsewhere that trackers have to be sent
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ....schemas.checkpoint import CheckpointFile, Ending, FittedBatches
from ....schemas.errors import StorageError, UsageError
from ..cache.cache_folder import Below, is_output, make_place, refuse_foreign
from ..disk import fs
from ..disk.failpoints import reach
from ..signed_records import SignedRecords

RECORD_NAME = "align_checkpoint.json"
STEP_NAME = re.compile(r"step-([0-9]{8,})")
ROW_PART_NAME = re.compile(r"step-([0-9]{8,})-[0-9]{1,9}\.parquet")
EVALUATION_NAME = re.compile(r"step-([0-9]{8,})\.csv")
DRAFT_NAME = re.compile(r"\.tmp-([0-9]{8,}|model|model-merged)-[0-9A-Za-z-]+")
TRASH_NAME = re.compile(r"\.trash-.+")


@dataclass(frozen=True)
class RunFolder:
    """One training run on a local disk."""

    root: Path

    metrics = Below("metrics.jsonl")
    nonfinite = Below("nonfinite.jsonl")
    rows = Below("rows.parquet")
    row_parts = Below("_align/rows")
    answers = Below("answers.jsonl")
    report = Below("report.html")
    config = Below("config.yaml")
    engine = Below("deepspeed.json")
    checkpoints = Below("checkpoints")
    latest = Below("checkpoints/latest")
    fitting = Below("checkpoints/fitted")
    model = Below("model")
    merged = Below("model-merged")
    private = Below("_align")
    lock = Below("_align/LOCK")
    mlflow = Below("_align/mlflow.json")
    copies = Below("_align/artifacts")
    ending = Below("_align/ending.json")

    when_locked = "Wait for it, or choose another --output."

    def ledger(self, tracker: str) -> Path:
        """What a tracker has to be sent; MLflow's lies where it lay when there was no other."""
        return self.mlflow if tracker == "mlflow" else self._ledgers / f"{tracker}.json"

    def records(self) -> list[Path]:
        """What was measured, and the settings."""
        named = (self.metrics, self.nonfinite, self.config, self.engine)
        return [path for path in (*named, *self.evaluations().values()) if path.exists()]

    def ledgers(self) -> list[Path]:
        """What is still to be sent, to whichever tracker."""
        others = sorted(self._ledgers.glob("*.json"))
        return [path for path in (self.mlflow, *others) if path.exists()]

    @property
    def loadable(self) -> Path:
        """The model for whoever loads it: where an adapter was merged, the whole one."""
        return self.merged if self.merged.exists() else self.model

    @property
    def pages(self) -> tuple[Path, ...]:
        """What is made of the records once a run has ended."""
        return self.answers, self.report

    @property
    def _ledgers(self) -> Path:
        return self.private / "trackers"

    def step(self, number: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.checkpoints / f"step-{number:08d}"

    def evaluation(self, number: int) -> Path:
        """The table of single completions, measured after a step."""
        return self.root / "evaluations" / f"step-{number:08d}.csv"

    def evaluations(self) -> dict[int, Path]:
        """The tables that exist, by step, in rising order."""
        paths = self.evaluation(0).parent.glob("step-*.csv")
        found = {path: EVALUATION_NAME.fullmatch(path.name) for path in paths}
        return dict(sorted((int(name[1]), path) for path, name in found.items() if name))

    def drop_evaluations(self, *, after: int) -> None:
        """Removes the tables of later steps; -1: all."""
        for step, path in self.evaluations().items():
            if step > after:
                fs.unlink(path)

    def row_part(self, number: int, rank: int) -> Path:
        """Where a rank writes its rows down, up to a step."""
        return self.row_parts / f"step-{number:08d}-{rank}.parquet"

    def rows_written(self) -> dict[Path, int]:
        """The parts that there are, and the last step of each."""
        found = {path: ROW_PART_NAME.fullmatch(path.name) for path in self.row_parts.glob("*")}
        return {path: int(name[1]) for path, name in sorted(found.items()) if name}

    def drop_rows(self, *, after: int) -> None:
        """Removes the table of rows, and the parts that end at later steps; -1: all."""
        fs.unlink(self.rows)
        for path, step in self.rows_written().items():
            if step > after:
                fs.unlink(path)

    def draft(self, number: int, run_id: str) -> Path:
        """Where the checkpoint of a step is while it is written."""
        path = self.checkpoints / f".tmp-{number:08d}-{run_id}"
        assert DRAFT_NAME.fullmatch(path.name), path.name
        return path

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or damaged, in rising order."""
        if not self.checkpoints.is_dir():
            return []
        found = map(STEP_NAME.fullmatch, (path.name for path in self.checkpoints.iterdir()))
        return sorted(int(name[1]) for name in found if name)

    def latest_step(self) -> int | None:
        """The step that `latest` names, even if its checkpoint is missing."""
        try:
            text = fs.read_bytes(self.latest).decode("ascii", "replace")
        except StorageError:
            return None
        name = STEP_NAME.fullmatch(text.strip())
        return int(name[1]) if name else None

    def note_fitting(self, fitted: FittedBatches) -> None:
        """Notes for the next start of several ranks what fits into the memory of each of them."""
        known = self.noted_fitting()
        fits = fitted.fits
        if known and known.planned == fitted.planned:  # of another rank that ran out as well
            fits = min(fits, known.fits)
        fs.publish(self.fitting, f"{fitted.planned} {fits}\n".encode(), label="latest")

    def noted_fitting(self) -> FittedBatches | None:
        """What was noted; None where nothing was."""
        try:
            planned, fits = map(int, fs.read_bytes(self.fitting).split())
        except (StorageError, ValueError):
            return None
        return FittedBatches(planned, fits)

    def empty_trash(self) -> None:
        """Removes for good what was renamed to be removed."""
        # First the renames: after a power loss no half-emptied folder may have its old name.
        fs.fsync_folder(self.checkpoints)
        reach("prune.forgotten")
        for path in sorted(self.checkpoints.iterdir()):
            if TRASH_NAME.fullmatch(path.name):
                fs.remove_tree(path)

    def prepare(self) -> None:
        """Makes the folders; refuses a folder that holds something else."""
        refuse_foreign(self.root, is_ours=self._is_ours, what="training run")
        make_place(self.root, self.private)
        fs.make_folder(self.checkpoints)
        fs.fsync_folder(self.root)

    def _is_ours(self) -> bool:
        is_cache = (self.root / "manifest.json").exists() or (self.root / "data").exists()
        return self.private.is_dir() and not is_cache and not is_output(self.private)

    def require_new(self) -> None:
        """Refuses to begin a run where one has begun already; the owner calls it.

        A run that ended before it measured anything, as by a wrong setting, has nothing to lose.
        """
        if self.model.exists():
            state = "a finished run"
        elif steps := self.steps():
            state = f"an unfinished run, with a checkpoint of step {steps[-1]}"
        elif self.metrics.exists():
            state = "an unfinished run without a checkpoint"
        else:
            return
        raise UsageError(
            f"{self.root} holds {state}. Continue it with --resume auto, choose another --output, "
            "or remove the folder."
        )

    def sweep(self) -> None:
        """Removes what killed runs left half written; the owner calls it at start."""
        doomed = self.left_over()
        # First their renames: after a power loss no half-emptied folder may have its old name.
        for parent in sorted({path.parent for path in doomed if path.is_dir()}):
            fs.fsync_folder(parent)
        for path in doomed:
            (fs.remove_tree if path.is_dir() else fs.unlink)(path)

    def left_over(self) -> list[Path]:
        """The files and folders that killed runs left half written or half removed."""
        parents = [parent for parent in (self.checkpoints, self.root) if parent.is_dir()]
        found = [path for parent in parents for path in sorted(parent.iterdir())]
        folders = [path for path in found if _is_left_over(path.name)]
        named = (self.latest, self.fitting, self.metrics, self.config, self.engine, self.mlflow)
        whole = (*named, self.rows, *self.pages)
        drafts = [
            draft
            for path in (*whole, self.ending)
            for draft in path.parent.glob(f".{path.name}.*.tmp")
        ]
        drafts += self.evaluation(0).parent.glob(".step-*.tmp")
        made_of = (self.copies, self._ledgers, self.row_parts)
        drafts += [draft for made in made_of for draft in made.glob(".*.tmp")]
        return [*folders, *drafts]


def _is_left_over(name: str) -> bool:
    return bool(DRAFT_NAME.fullmatch(name) or TRASH_NAME.fullmatch(name))


def trash_name(path: Path) -> Path:
    """A free name for something that is about to be removed."""
    return path.with_name(f".trash-{path.name.lstrip('.')}-{secrets.token_hex(4)}")


def write_ending(folder: RunFolder, ending: Ending) -> None:
    """Writes how a run ended."""
    _endings(folder).replace(folder.ending, ending)


def forget_ending(folder: RunFolder) -> None:
    """Removes the ending of a run that is resumed."""
    if folder.ending.exists():
        _endings(folder).drop(folder.ending)


def read_ending(folder: RunFolder) -> Ending | None:
    """How the run ended; None if it has not, or if it was killed."""
    return _endings(folder).find(folder.ending)


def _endings(folder: RunFolder) -> SignedRecords[Ending]:
    return SignedRecords(
        Ending,
        label="ending",
        remedy=(
            f"Restore it from a copy, or remove {folder.ending}: the run then counts as killed, "
            "and --resume auto continues from its last checkpoint."
        ),
    )


def described(root: Path, path: Path) -> CheckpointFile:
    """A file as it is now: its name below a folder, its length and its digest."""
    size = path.stat().st_size
    return CheckpointFile(path.relative_to(root).as_posix(), size, fs.sha256_of(path))


def remove_model(target: Path) -> None:
    """Removes a model's folder, if there is one; at no moment half of it is there."""
    if target.exists():
        trash = trash_name(target)
        fs.rename(target, trash)
        fs.fsync_folder(target.parent)
        fs.remove_tree(trash)


def save_model(target: Path, write: Callable[[Path], object], run_id: str) -> None:
    """Lets `write` fill a folder that then becomes `target`; one rank does this."""
    draft = target.with_name(f".tmp-{target.name}-{run_id}")
    fs.make_folder(draft)
    write(draft)
    fs.share(draft)
    for path in (*draft.rglob("*"), draft):
        (fs.fsync_folder if path.is_dir() else fs.fsync)(path)
    trash = trash_name(target)
    if target.exists():
        fs.rename(target, trash)
    reach("model.before_rename")
    fs.rename(draft, target)
    reach("model.after_rename")
    fs.fsync_folder(target.parent)
    if trash.exists():  # only now: a power loss can no longer bring its old name back
        fs.remove_tree(trash)
