"""What a run leaves behind while it learns: metrics, an MLflow run, checkpoints."""

from __future__ import annotations

import json
import logging
import time
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ..schemas.errors import Interrupted, StorageError
from ..stages.storage import fs
from ..stages.tracking.no_progress import NoProgress
from ..stages.tracking.null_run import NullRun
from ..stages.tracking.training_run import open_training_run
from .keeping import Keeper
from .settings import flatten, redacted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..schemas.tracking import Progress, Run
    from ..stages.train.loop import Place
    from .run_start import Start
    from .session import Session

logger = logging.getLogger("align")

SECONDS_PER_LINE = 5.0
SHOWN = ("loss", "rewards/margins", "rewards/accuracies", "log_odds/accuracy", "grad_norm", "lr")


@contextmanager
def open_records(session: Session, start: Start, progress: Progress) -> Iterator[RunRecords]:
    """The first rank tells MLflow and the metrics file; every rank saves its part."""
    run: Run = NullRun()
    if session.world.rank == 0:
        run = open_training_run(
            session.job.config.tracking,
            start.folder,
            name=session.recipe.name,
            tags=_tags(session),
            # What was measured before the first step is measured again by whoever begins there.
            keep_through=start.checkpoint_step or -1,
        )
    else:
        progress = NoProgress()
    status = "FAILED"
    try:
        records = RunRecords(session, start, run, progress)
        yield records
        status = "FINISHED" if records.is_finished else "KILLED"
    except (Interrupted, KeyboardInterrupt):
        status = "KILLED"
        raise
    finally:
        progress.end()
        run.finish(status)  # type: ignore[arg-type]


class RunRecords:
    """Where the loop of one rank tells what happens."""

    def __init__(self, session: Session, start: Start, run: Run, progress: Progress) -> None:
        self._session = session
        self._start = start
        self._run = run
        self._progress = progress
        self._keeper = Keeper(session, start)
        self._last_line = 0.0
        # The newest value of each, those from before an interruption included.
        self.metrics = dict(start.checkpoint.position.metrics) if start.checkpoint else {}
        self.is_finished = False

    @property
    def mlflow_run_id(self) -> str:
        """The store's name for the run, empty where there is none."""
        return self._run.run_id

    def say(self, line: str) -> None:
        """Tells a person."""
        self._progress.say(line)

    def begin(self, place: Place, total_steps: int) -> None:
        """The run's settings, and how far it has to go."""
        if self._session.world.rank == 0:
            self._describe()
        if place.step:
            self.say(f"going on after step {place.step:,}")
        self._progress.begin("training", total=total_steps - place.step, unit="steps")

    def agreed(self, gap: float) -> None:
        """The policy gives the numbers of the cache, nearly."""
        self.say(f"policy and cache agree to {gap:.1e} nats per completion")
        self._run.log_params({"gate.largest_gap": f"{gap:.3e}"})

    def stepped(self, place: Place, metrics: dict[str, float]) -> None:
        """An optimizer step is done."""
        self._log(place, metrics)
        self._progress.advance(1, tokens=round(metrics["tokens"]), padding=0)
        if time.monotonic() - self._last_line >= SECONDS_PER_LINE:
            self._last_line = time.monotonic()
            self.say(f"step {place.step:,}: {shown(metrics)}")

    def evaluated(self, place: Place, metrics: dict[str, float]) -> None:
        """The held-out rows were measured."""
        self._log(place, metrics)
        plain = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        self.say(f"step {place.step:,}, held-out rows: {shown(plain)}")

    def not_applied(self, place: Place, row_ids: tuple[str, ...]) -> None:
        """A step gave NaN or infinity; the ids of this rank's rows in it are written down."""
        line = {"step": place.step, "rank": self._session.world.rank, "row_ids": row_ids}
        with fs.append(self._start.folder.root / "nonfinite.jsonl") as sink:
            sink.write((json.dumps(line) + "\n").encode())
        self.say(f"step {place.step:,} gave NaN or infinity and was not applied")

    def save(self, place: Place) -> None:
        """A checkpoint; one that fails is told, three in a row end the run."""
        self._run.sync()
        saved = self._keeper.save(place, self.metrics, mlflow_run_id=self.mlflow_run_id)
        if not saved.succeeded:
            self._log(place, {"checkpoint_failed": 1.0})
            self.say(f"step {place.step:,}: no checkpoint: {saved.failure}")
            if self._keeper.failures >= Keeper.MOST_FAILURES:
                raise StorageError(
                    f"{self._keeper.failures} checkpoints in a row could not be saved. The last: "
                    f"{saved.failure}"
                )

    def finish(self, place: Place) -> None:
        """The model is written."""
        self.is_finished = True
        folder = self._start.folder
        for path in (folder.metrics, folder.config, folder.root / "deepspeed.json"):
            self._run.log_artifact(path)
        self._run.log_artifact(folder.model / "README.md")
        tags = {"align.cache_root": self._session.job.manifest.root, "align.step": str(place.step)}
        self._run.log_model_link(folder.model, tags=tags)

    def _log(self, place: Place, metrics: dict[str, float]) -> None:
        self.metrics |= metrics
        self._run.log_metrics(metrics, step=place.step)

    def _describe(self) -> None:
        session, folder = self._session, self._start.folder
        config = json.dumps(session.engine_config, indent=2, sort_keys=True, default=str)
        fs.publish(folder.root / "deepspeed.json", f"{config}\n".encode(), label="config")
        self._run.log_params(_params(session))
        cache = session.job.cache
        self._run.log_dataset(
            cache.root.resolve().name,
            digest=session.job.manifest.root,
            source=str(cache.root.resolve()),
            context="training",
        )
        self._run.log_artifact(cache.manifest)


def shown(metrics: dict[str, float]) -> str:
    """The few numbers a person wants to see at once."""
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics)


def _params(session: Session) -> dict[str, str]:
    config = session.job.config
    sections = {"train", "model"} | ({"lora"} if config.lora.enabled else set())
    settings: dict[str, Any] = {
        name: redacted(value)
        for name, value in flatten(config).items()
        if name.partition(".")[0] in sections
    }
    options = {f"method.{name}": value for name, value in session.recipe.values.items()}
    counts = {"rows.train": session.source.train_rows, "rows.eval": session.source.eval_rows}
    return {name: str(value) for name, value in {**settings, **options, **counts}.items()}


def _tags(session: Session) -> dict[str, str]:
    job = session.job
    return {
        **job.tags,
        "align.stage": "train",
        "align.method": session.recipe.name,
        "align.cache_root": job.manifest.root,
        "align.cache": str(job.cache.root.resolve()),
        "align.reference_weights": job.manifest.fingerprint["model.weights"],
        "align.policy": job.policy.path,
        "align.world_size": str(session.world.size),
        "deepspeed.version": version("deepspeed"),
    }
