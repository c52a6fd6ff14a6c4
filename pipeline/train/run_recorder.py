"""Records of a training: metrics, a run in each tracker, checkpoints."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path

from ...schemas.batches import EvalSample, Visits
from ...schemas.cache import Stops
from ...schemas.checkpoint import Checkpoint, Ending, FittedBatches, How
from ...schemas.errors import AlignError, Interrupted, StorageError, log_failure
from ...schemas.safe_text import redacted
from ...stages.data.tokenizer import decoder
from ...stages.engine.distributed import run_on_rank_zero
from ...stages.report.eval_table import Decode, Kind, evaluation_csv
from ...stages.report.signs import Sign
from ...stages.report.visited_rows import PendingVisits
from ...stages.storage.copies import origin_of
from ...stages.storage.disk import fs
from ...stages.storage.disk.lines import Lines
from ...stages.storage.run.run_folder import RunFolder, write_ending
from ...stages.tracking.journal import EVAL
from ...stages.tracking.journaled_run import Run, open_training_run
from ...stages.tracking.progress import NoProgress, Progress
from ...stages.tracking.tracker import MAIN, Status
from ...stages.train.loop import TrainingPosition
from ...stages.train.throughput import Machine
from ..options.settings import flatten, without_secrets
from ..plan.best_metric import BestMetric
from .checkpointer import Checkpointer, planned_by, require_disk_space
from .resume import Start, identity_of
from .run_description import describe_training, name_of_training, record_inputs, record_signs
from .run_report import write_report
from .training_job import Session

logger = logging.getLogger("align")

SECONDS_PER_LINE = 5.0
SHOWN = ("loss", "rewards/margins", "rewards/accuracies", "log_odds/accuracy", "grad_norm", "lr")


@contextmanager
def open_records(session: Session, start: Start, progress: Progress) -> Iterator[RunRecords]:
    """Opens a run's records: rank zero writes the journal and the ledgers, every rank saves."""
    run = Run(start.folder.root)
    if session.world.rank == 0:
        keep_through = start.checkpoint_step if start.checkpoint else -1
        start.folder.drop_evaluations(after=keep_through)
        start.folder.drop_rows(after=keep_through)
        run = open_training_run(
            session.job.config.tracking,
            start.folder,
            name=name_of_training(session.job, session.recipe.name),
            tags=_tags(session, start.changes),
            keep_through=keep_through,
            is_evaluated=_is_evaluated(start.checkpoint),
        )
        run.callbacks = session.job.callbacks
    else:
        progress = NoProgress()
    status: Status = "FAILED"
    records = RunRecords(session, start, run, progress)
    try:
        yield records
        status = "FINISHED" if records.is_finished else "KILLED"
    except (Interrupted, KeyboardInterrupt):
        status = "KILLED"
        raise
    except Exception as error:
        if not records.is_finished:
            with log_failure("No record of how the run ended"):
                records.ended("failed", reason=_told(error))
            records.report()
        raise
    finally:
        progress.end()
        run.finish(status)


class RunRecords:
    """Records of one rank's loop: the journal, ledgers, the terminal, checkpoints."""

    def __init__(self, session: Session, start: Start, run: Run, progress: Progress) -> None:
        self._session = session
        self._start = start
        self._run = run
        self._progress = progress
        self._checkpointer = Checkpointer(session, start)
        self._machine = _machine(session, start)
        self._visits = PendingVisits()
        self._tables = EvaluationTables(session, start.folder)
        self._best = BestMetric(session.job.config.train)
        self._last_line = 0.0
        self._step = start.checkpoint_step
        self._total_steps = 0
        # Measured at the newest step and at no other, and finite.
        self.metrics = dict(start.checkpoint.position.metrics) if start.checkpoint else {}
        self.is_evaluated = _is_evaluated(start.checkpoint)  # the step it begins at
        self.is_finished = False

    def origins(self) -> dict[str, str]:
        """The trackers' ids of the run, and the tag by which they find it."""
        return self._run.origins()

    def say(self, line: str) -> None:
        """Prints a line."""
        self._progress.say(line)

    def begin(self, position: TrainingPosition, total_steps: int) -> None:
        """Requires the disk space, records the run's settings, and starts its progress."""
        self._total_steps = total_steps
        run_on_rank_zero(
            self._session.world, lambda: require_disk_space(self._session, self._start.folder)
        )
        if self._session.world.rank == 0:
            self._describe()
        if position.step:
            self.say(f"continuing after step {position.step:,}")
        self._progress.begin("training", total=max(total_steps - position.step, 0), unit="steps")

    def agreed(self, gap: float, *, is_packed: bool) -> None:
        """Records the largest difference between the log-probs of the policy and of the cache."""
        begins = (
            "in 4 bits the model begins near the reference of the cache, not at it"
            if is_packed
            else "checked: the model reproduces the cached log-probs"
        )
        self.say(f"{begins} (largest difference {gap:.1e} nats per completion)")
        self._run.log_params({"gate.largest_gap": f"{gap:.3e}"})

    def stepped(
        self, position: TrainingPosition, metrics: dict[str, float], line: dict[str, float] | None
    ) -> None:
        """Records an optimizer step; `line` is the journal line of several, if one is due."""
        self._run.begin_sending()
        self._measured(position, metrics)
        if line is not None:
            seen = self._machine.now() if self._machine else {}
            self._run.log_metrics({**line, **seen}, step=position.step)
        padded = metrics["tokens"] / (1 - metrics["padding"])
        padding = round(padded - metrics["tokens"])
        self._progress.advance(1, tokens=round(padded), padding=padding)
        if time.monotonic() - self._last_line >= SECONDS_PER_LINE:
            self._last_line = time.monotonic()
            self.say(f"step {position.step:,}: {shown(metrics)}")

    def evaluated(
        self, position: TrainingPosition, metrics: dict[str, float], samples: Sequence[EvalSample]
    ) -> None:
        """Records an evaluation on the held-out rows."""
        self._measured(position, metrics)
        self._run.log_metrics(metrics, step=position.step)
        if self._checkpointer.has(position):
            self._run.sync()
            self._checkpointer.add_metrics(position, metrics)
        if samples and self._session.world.rank == 0:
            with log_failure("No table of single completions"):
                self._run.log_artifact(self._tables.write(position.step, samples))
        plain = {name.removeprefix(EVAL): value for name, value in metrics.items()}
        self.say(f"step {position.step:,}, held-out rows: {shown(plain)}")

    def ran_out(self, step: int, tokens: int) -> None:
        """Records that memory ran out; of several ranks this one ends, and notes what fits."""
        if self._session.world.size > 1:
            self._start.folder.note_fitting(FittedBatches(planned_by(self._session), tokens))
        self.say(
            f"step {step + 1:,}: memory ran out; from here on at most {tokens:,} tokens per batch, "
            "with the same result"
        )

    def not_applied(self, position: TrainingPosition, row_ids: tuple[str, ...]) -> None:
        """Records a step of NaN or infinity, with the ids of this rank's rows in it."""
        line = {"step": position.step, "rank": self._session.world.rank, "row_ids": row_ids}
        with closing(Lines(self._start.folder.nonfinite)) as lines:
            lines.append(json.dumps(line).encode())
        self.say(f"step {position.step:,} gave NaN or infinity and was not applied")

    def visited(self, position: TrainingPosition, epoch: int, visits: Visits) -> None:
        """Keeps the margins of this rank's rows until the next checkpoint."""
        self._visits.add(visits, epoch=epoch, step=position.step)

    def _write_visits(self, step: int) -> None:
        """Writes down the rows up to a step, before its checkpoint: a resumed run drops others."""
        folder = self._start.folder
        if self._visits:
            with log_failure("Margins of training rows are kept for the next checkpoint"):
                fs.make_folder(folder.row_parts)
                self._visits.write(folder.row_part(step, self._session.world.rank))
                self._visits = PendingVisits()

    def save(self, position: TrainingPosition) -> None:
        """Saves a checkpoint, unless there is one; a failure is logged, three in a row end it."""
        if self._checkpointer.has(position):
            return
        self._run.sync()
        self._write_visits(position.step)
        measured = self.metrics if position.step == self._step else {}
        saved = self._checkpointer.save(
            position, measured, mlflow_run_id=self._run.run_ids.get(MAIN, "")
        )
        if not saved.succeeded:
            self._run.log_metrics({"checkpoint_failed": 1.0}, step=position.step)
            self.say(f"step {position.step:,}: no checkpoint: {saved.failure}")
            if self._checkpointer.failures >= Checkpointer.MOST_FAILURES:
                raise StorageError(
                    f"{self._checkpointer.failures} checkpoints in a row could not be saved. "
                    f"The last: {saved.failure}"
                )

    def finish(self, step: int) -> None:
        """Records the written model, and the step that it is of."""
        self.is_finished = True
        folder = self._start.folder
        for path in (folder.metrics, folder.config, folder.engine):
            self._run.log_artifact(path)
        uploads = self._session.job.config.tracking.upload_model
        self._run.log_artifact(folder.model if uploads else folder.model / "README.md")
        if uploads and folder.merged.exists():
            self._run.log_artifact(folder.merged)
        root = self._session.job.manifest.root
        tags = {"align.cache_root": root, "align.step": str(step)}
        self._run.log_model_link(folder.model, tags=tags)

    def ended(self, how: How, *, reason: str = "", model_step: int | None = None) -> None:
        """Records how the run ended; a run without this record was killed."""
        if self._session.world.rank:
            return
        self._run.sync()
        ending = Ending(
            ending=how,
            step=self._step,
            total_steps=self._total_steps,
            identity=identity_of(self._session),
            changes=self._start.changes,
            reason=redacted(reason),
            model_step=model_step,
        )
        write_ending(self._start.folder, ending)

    def report(self) -> tuple[Sign, ...]:
        """Writes the report, if there are metrics; returns what stands out, and records it."""
        signs: tuple[Sign, ...] = ()
        if self._session.world.rank == 0 and self._start.folder.metrics.stat().st_size:
            with log_failure("No report"):
                signs = write_report(self._start.folder.root)
                self._run.log_artifact(self._start.folder.report)
                record_signs(self._run, signs)
        return signs

    def _measured(self, position: TrainingPosition, metrics: dict[str, float]) -> None:
        if position.step != self._step:
            self._step, self.metrics = position.step, {}
        self.metrics |= {name: value for name, value in metrics.items() if math.isfinite(value)}
        if (said := self._best.warning(metrics)) and self._session.world.rank == 0:
            logger.warning("%s", said)

    def _describe(self) -> None:
        session = self._session
        params = _params(session)
        self._run.log_params(params)
        self._run.describe(describe_training(session, params, self._start.folder))
        record_inputs(self._run, session.job)
        self._run.log_artifact(session.job.cache.manifest_file)


def _told(error: Exception) -> str:
    """What a person is told of it; what no message of ours explains has a traceback in the log."""
    return str(error) if isinstance(error, AlignError) else f"{type(error).__name__}: {error}"


def shown(metrics: dict[str, float]) -> str:
    """The main metrics, in a line."""
    known = {name: metrics[name] for name in SHOWN if math.isfinite(metrics.get(name, math.nan))}
    return ", ".join(f"{name} {value:.4g}" for name, value in known.items())


def _machine(session: Session, start: Start) -> Machine | None:
    is_wanted = session.job.config.tracking.system_metrics and session.world.rank == 0
    return Machine(start.folder.root) if is_wanted else None


def _is_evaluated(checkpoint: Checkpoint | None) -> bool:
    """Whether a checkpoint has metrics of held-out rows."""
    return checkpoint is not None and any(
        name.startswith(EVAL) for name in checkpoint.position.metrics
    )


def _params(session: Session) -> dict[str, str]:
    settings = used_settings(session, "train", "model")
    options = {f"method.{name}": value for name, value in session.recipe.values.items()}
    counts = {"rows.train": session.source.train_rows, "rows.eval": session.source.eval_rows}
    counts |= session.source.counts
    return {name: str(value) for name, value in {**settings, **options, **counts}.items()}


def _tags(session: Session, changes: tuple[str, ...]) -> dict[str, str]:
    job = session.job
    changed = {"align.changed": "; ".join(changes)} if changes else {}
    return {
        **changed,
        "align.stage": "train",
        "align.method": session.recipe.name,
        "align.cache_root": job.manifest.root,
        "align.cache": origin_of(str(job.cache.root.resolve())),
        "align.reference_weights": job.manifest.fingerprint["model.weights"],
        "align.policy": job.policy.path,
        "align.world_size": str(session.world.size),
        "deepspeed.version": version("deepspeed"),
    }


class EvaluationTables:
    """Writer of a run's evaluation tables; the tokenizer is loaded for the first with text."""

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self._session = session
        self._folder = folder
        self._decode: Decode | None = None

    def write(self, step: int, samples: Sequence[EvalSample]) -> Path:
        """Writes the table of one evaluation."""
        job = self._session.job
        if job.config.train.eval_text and not self._decode:
            self._decode = decoder(job.policy.path, Stops.of(job.manifest.fingerprint).tokens)
        path = self._folder.evaluation(step)
        fs.make_folder(path.parent)
        text = evaluation_csv(samples, self._kind, decode=self._decode)
        fs.publish(path, text.encode())
        return path

    @property
    def _kind(self) -> Kind:
        if self._session.recipe.head == "score":
            return "scores"
        return "log-probs" if self._session.job.read_spec.context else "log-ratios"


def used_settings(session: Session, *sections: str) -> dict[str, str]:
    """The settings of these sections as this run uses them, by their dotted names."""
    config, policy = session.job.config, session.job.policy
    chosen = {*sections} | ({"lora"} if config.lora.enabled else set())
    found = {
        "model.path": policy.path,
        "model.adapter": policy.adapter,
        "model.device": session.policy.device.type,
        "train.cache": origin_of(str(session.job.cache.root)),
        "train.model": policy.path,
        "train.tokens_per_batch": session.feed.settings.tokens_per_batch,
        "train.dtype": session.policy.dtype,
    }
    # How a run was begun is not a setting of its training.
    asked = {name: value for name, value in flatten(config).items() if name != "train.resume"}
    return {
        name: str(value)
        for name, value in without_secrets({**asked, **found}).items()
        if name.partition(".")[0] in chosen
    }
