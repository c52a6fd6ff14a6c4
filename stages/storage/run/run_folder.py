"""The folder of a training run.

metrics.jsonl                   one line per logged step
nonfinite.jsonl                 rows of steps with NaN or infinity, if any
evaluations/step-<n>.csv        single held-out completions, a line each
rows.parquet                    the margin of each training row at each step that ran it
answers.jsonl                   answers to held-out prompts before and after training
evaluated/                      results of `align evaluate`: results.json, <set>.csv, the harness's
report.html                     all of this on one page
config.yaml                     the settings at the start of the run
deepspeed.json                  the configuration of DeepSpeed
checkpoints/step-<n>/           complete checkpoints; `latest` names the newest
checkpoints/.tmp-<n>-<run id>/  one that is being written; .trash-…: one that is being removed
model/                          the trained policy of a finished run
model-merged/                   an adapter's policy with the adapter merged into it
_align/LOCK                     locked by the process that trains here
_align/ending.json              the status at the end; missing while the run runs, or after a kill
_align/run.json                 the run's data for trackers, except metrics.jsonl
_align/sent.json                how much of the run each tracker has
_align/rows/<rank>.jsonl        the lines from which rows.parquet is made
_align/artifacts/               copies of other files for trackers
"""

from __future__ import annotations

import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from ....schemas.checkpoint import RunEnding
from ....schemas.errors import StorageError, UsageError
from ..disk import fs
from ..locations import is_remote
from ..output_folder import is_output, make_place, refuse_foreign
from ..records import Records

RECORD_NAME = "align_checkpoint.json"
STEP_NAME = re.compile(r"step-([0-9]{8,})")
EVALUATION_NAME = re.compile(r"step-([0-9]{8,})\.csv")
ENDINGS = Records(
    RunEnding,
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
        self.evaluated = root / "evaluated"
        self.results = self.evaluated / "results.json"
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
        """The model to load: the merged one, if an adapter was merged."""
        return self.merged if self.is_merged else self.model

    @property
    def is_merged(self) -> bool:
        """Whether the adapter was also merged."""
        return self.merged.exists()

    # Tables of evaluations and of training rows

    def evaluation(self, number: int) -> Path:
        """The table of single completions of the evaluation after a step."""
        return self.root / "evaluations" / f"step-{number:08d}.csv"

    def evaluations(self) -> dict[int, Path]:
        """The tables that exist, by step, in rising order."""
        paths = (self.root / "evaluations").glob("step-*.csv")
        found = {path: EVALUATION_NAME.fullmatch(path.name) for path in paths}
        return dict(sorted((int(name[1]), path) for path, name in found.items() if name))

    def drop_evaluations(self, *, after: int) -> None:
        """Removes the evaluation tables of later steps; -1: all."""
        for step, path in self.evaluations().items():
            if step > after:
                fs.unlink(path)

    def rows_written(self) -> list[Path]:
        """The files of row margins, one per rank."""
        return sorted(self.row_parts.glob("*.jsonl"))

    # Checkpoints

    def step(self, number: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.checkpoints / f"step-{number:08d}"

    def draft(self, number: int, run_id: str) -> Path:
        """The folder of a step's checkpoint while it is written."""
        return self.checkpoints / f".tmp-{number:08d}-{run_id}"

    def steps(self) -> list[int]:
        """The steps with a checkpoint, complete or damaged, in rising order."""
        if not self.checkpoints.is_dir():
            return []
        found = map(STEP_NAME.fullmatch, (path.name for path in self.checkpoints.iterdir()))
        return sorted(int(name[1]) for name in found if name)

    def latest_step(self) -> int | None:
        """The step in `latest`, even if its checkpoint is missing."""
        try:
            text = fs.read_bytes(self.latest).decode("ascii", "replace")
        except StorageError:
            return None
        name = STEP_NAME.fullmatch(text.strip())
        return int(name[1]) if name else None

    # The folder itself

    def prepare(self) -> None:
        """Makes the folders; refuses a folder with other content."""
        refuse_foreign(self.root, is_ours=self._is_ours, what="training run")
        make_place(self.root, self.private)
        fs.make_folder(self.checkpoints)
        fs.fsync(self.root)

    def _is_ours(self) -> bool:
        is_cache = (self.root / "manifest.json").exists() or (self.root / "data").exists()
        return self.private.is_dir() and not is_cache and not is_output(self.private)

    def require_new(self) -> None:
        """Refuses to start a run where one has started; the owner calls it.

        A run that ended before it measured anything, for example by a wrong setting, may be lost.
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
        """The half-written and half-removed files and folders of killed runs."""
        if not self.root.is_dir():
            return []
        folders = (self.root, self.checkpoints, self.root / "evaluations", self.private)
        of_private = (self.row_parts, self.private / "artifacts")
        found = [path for folder in (*folders, *of_private) for path in folder.glob(".*")]
        return sorted(path for path in found if LEFT_OVER.fullmatch(path.name))

    def sweep(self) -> None:
        """Removes the half-written files of killed runs; the owner calls it at start."""
        doomed = self.left_over()
        # Renames first: after a power loss no half-emptied folder may have its old name.
        for parent in sorted({path.parent for path in doomed if path.is_dir()}):
            fs.fsync(parent)
        for path in doomed:
            (fs.remove_tree if path.is_dir() else fs.unlink)(path)

    def empty_trash(self) -> None:
        """Deletes the folders that were renamed for removal."""
        fs.fsync(self.checkpoints)  # renames first, as above
        for path in sorted(self.checkpoints.glob(".trash-*")):
            fs.remove_tree(path)


def run_folder_of(output: str) -> RunFolder:
    """The local folder of a run: its output, or a work folder if the output is in a bucket."""
    if not is_remote(output):
        return RunFolder(Path(output))
    from ..copies import work_folder  # noqa: PLC0415 - only a bucket needs it

    return RunFolder(work_folder(output))


def trash_name(path: Path) -> Path:
    """A free name for something that is about to be removed."""
    return path.with_name(f".trash-{path.name.lstrip('.')}-{secrets.token_hex(4)}")


def read_ending(folder: RunFolder) -> RunEnding | None:
    """The status at the end of the run; None if it still runs or was killed."""
    return ENDINGS.find(folder.ending)


def remove_model(target: Path) -> None:
    """Removes a model's folder, if it exists, atomically."""
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
    # Some libraries write files that only their owner can read: all get default permissions.
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
    if trash.exists():  # after the sync: a power loss cannot bring its old name back
        fs.remove_tree(trash)
