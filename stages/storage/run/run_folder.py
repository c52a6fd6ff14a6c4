"""The folder of a training run.

metrics.jsonl                   one line per logged step
nonfinite.jsonl                 rows of the steps that gave NaN or infinity, if there were any
evaluations/step-<n>.csv        single held-out completions, a line each
rows.parquet                    the margin of each training row at each visit
answers.jsonl                   held-out prompts, answered before training and after
report.html                     all of this on one page
config.yaml                     the settings the run began with
deepspeed.json                  the configuration of DeepSpeed
checkpoints/step-<n>/           whole checkpoints; `latest` names the newest
checkpoints/.tmp-<n>-<run id>/  one that is being written; .trash-…: one that is being removed
model/                          the trained policy of a finished run
model-merged/                   an adapter's policy with the adapter merged into it
_align/LOCK                     locked by the process that trains here
_align/ending.json              how the run ended; missing while it runs, or after a kill
_align/run.json                 what trackers are sent of the run, beside metrics.jsonl
_align/sent.json                how much of it each tracker has
_align/rows/<rank>.jsonl        the lines that rows.parquet is made of
_align/artifacts/               copies of files from elsewhere that trackers have to be sent
"""

from __future__ import annotations

import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from ....schemas.checkpoint import Ending
from ....schemas.errors import StorageError, UsageError
from ..disk import fs
from ..locations import is_remote
from ..output_folder import is_output, make_place, refuse_foreign
from ..records import Records

RECORD_NAME = "align_checkpoint.json"
STEP_NAME = re.compile(r"step-([0-9]{8,})")
EVALUATION_NAME = re.compile(r"step-([0-9]{8,})\.csv")
ENDINGS = Records(
    Ending,
    remedy="Remove it: the run then counts as killed, and --resume auto continues it.",
)
LEFT_OVER = re.compile(r"\.tmp-.+|\.trash-.+|\..+\.tmp")


class RunFolder:
    """One training run on a local disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.nonfinite = root / "nonfinite.jsonl"
        self.rows = root / "rows.parquet"
        self.answers = root / "answers.jsonl"
        self.report = root / "report.html"
        self.config = root / "config.yaml"
        self.engine = root / "deepspeed.json"
        self.checkpoints = root / "checkpoints"
        self.latest = root / "checkpoints" / "latest"
        self.model = root / "model"
        self.merged = root / "model-merged"
        self.private = root / "_align"
        self.run_record = self.private / "run.json"
        self.sent = self.private / "sent.json"
        self.row_parts = self.private / "rows"
        self.ending = self.private / "ending.json"
        self.pages = (self.answers, self.report)  # made once a run has ended

    @property
    def loadable(self) -> Path:
        """The model for whoever loads it: where an adapter was merged, the merged one."""
        return self.merged if self.merged.exists() else self.model

    # Tables of evaluations and of training rows

    def evaluation(self, number: int) -> Path:
        """The table of single completions, measured after a step."""
        return self.root / "evaluations" / f"step-{number:08d}.csv"

    def evaluations(self) -> dict[int, Path]:
        """The tables that exist, by step, in rising order."""
        paths = (self.root / "evaluations").glob("step-*.csv")
        found = {path: EVALUATION_NAME.fullmatch(path.name) for path in paths}
        return dict(sorted((int(name[1]), path) for path, name in found.items() if name))

    def drop_evaluations(self, *, after: int) -> None:
        """Removes the tables of later steps; -1: all."""
        for step, path in self.evaluations().items():
            if step > after:
                fs.unlink(path)

    def rows_written(self) -> list[Path]:
        """The files of the margins of rows, one of each rank."""
        return sorted(self.row_parts.glob("*.jsonl"))

    # Checkpoints

    def step(self, number: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.checkpoints / f"step-{number:08d}"

    def draft(self, number: int, run_id: str) -> Path:
        """Where the checkpoint of a step is while it is written."""
        return self.checkpoints / f".tmp-{number:08d}-{run_id}"

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

    # The folder itself

    def prepare(self) -> None:
        """Makes the folders; refuses a folder that holds something else."""
        refuse_foreign(self.root, is_ours=self._is_ours, what="training run")
        make_place(self.root, self.private)
        fs.make_folder(self.checkpoints)
        fs.fsync(self.root)

    def _is_ours(self) -> bool:
        is_cache = (self.root / "manifest.json").exists() or (self.root / "data").exists()
        return self.private.is_dir() and not is_cache and not is_output(self.private)

    def require_new(self) -> None:
        """Refuses to begin a run where one has begun already; the owner calls it.

        A run that ended before it measured anything, as by a wrong setting, has nothing to lose.
        """
        steps = self.steps()
        if not (self.model.exists() or steps or self.metrics.exists()):
            return
        last = f"a checkpoint of step {steps[-1]}" if steps else "no checkpoint"
        state = "a finished run" if self.model.exists() else f"an unfinished run with {last}"
        raise UsageError(
            f"{self.root} holds {state}. Continue it with --resume auto, choose another --output, "
            "or remove the folder."
        )

    def left_over(self) -> list[Path]:
        """The files and folders that killed runs left half written or half removed."""
        if not self.root.is_dir():
            return []
        folders = (self.root, self.checkpoints, self.root / "evaluations", self.private)
        of_private = (self.row_parts, self.private / "artifacts")
        found = [path for folder in (*folders, *of_private) for path in folder.glob(".*")]
        return sorted(path for path in found if LEFT_OVER.fullmatch(path.name))

    def sweep(self) -> None:
        """Removes what killed runs left half written; the owner calls it at start."""
        doomed = self.left_over()
        # First their renames: after a power loss no half-emptied folder may have its old name.
        for parent in sorted({path.parent for path in doomed if path.is_dir()}):
            fs.fsync(parent)
        for path in doomed:
            (fs.remove_tree if path.is_dir() else fs.unlink)(path)

    def empty_trash(self) -> None:
        """Removes for good what was renamed to be removed."""
        fs.fsync(self.checkpoints)  # first the renames, as above
        for path in sorted(self.checkpoints.glob(".trash-*")):
            fs.remove_tree(path)


def run_folder_of(output: str) -> RunFolder:
    """The folder that a run works in: its output, or one on this machine for a bucket."""
    if not is_remote(output):
        return RunFolder(Path(output))
    from ..copies import work_folder  # noqa: PLC0415 - only a bucket needs it

    return RunFolder(work_folder(output))


def trash_name(path: Path) -> Path:
    """A free name for something that is about to be removed."""
    return path.with_name(f".trash-{path.name.lstrip('.')}-{secrets.token_hex(4)}")


def read_ending(folder: RunFolder) -> Ending | None:
    """How the run ended; None if it has not, or if it was killed."""
    return ENDINGS.find(folder.ending)


def remove_model(target: Path) -> None:
    """Removes a model's folder, if there is one; at no moment half of it is there."""
    if target.exists():
        trash = trash_name(target)
        fs.rename(target, trash)
        fs.fsync(target.parent)
        fs.remove_tree(trash)


def save_model(target: Path, write: Callable[[Path], object], run_id: str) -> None:
    """Lets `write` fill a folder that then becomes `target`; one rank does this."""
    draft = target.with_name(f".tmp-{target.name}-{run_id}")
    fs.make_folder(draft)
    write(draft)
    # Some libraries let nobody else read their files: all get the permissions of a new one.
    usual = draft / f".{secrets.token_hex(8)}.tmp"
    usual.touch()
    mode = stat.S_IMODE(usual.stat().st_mode)
    usual.unlink()
    for path in (*draft.rglob("*"), draft):
        if path.is_file():
            path.chmod(mode)
        fs.fsync(path)
    trash = trash_name(target)
    if target.exists():
        fs.rename(target, trash)
    fs.rename(draft, target)
    fs.fsync(target.parent)
    if trash.exists():  # only now: a power loss can no longer bring its old name back
        fs.remove_tree(trash)
