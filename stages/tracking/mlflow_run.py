"""A run recorded in MLflow call by call, while the work waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ... import __version__
from ...schemas.config import TrackingOptions
from ...schemas.errors import Interrupted
from ...schemas.safe_text import redacted
from .journal import (
    MAX_PARAM,
    DatasetNote,
    MetricPoint,
    ModelLink,
    NullRun,
    Run,
    Status,
    key_of,
    shortened,
)
from .mlflow_client import GOES_ON_TAG, KEY_TAG, MlflowStore
from .outbox import Guard, Note

DEFAULT_URI = "sqlite:///mlflow.db"


def open_run(
    options: TrackingOptions, *, name: str, tags: Mapping[str, str], note: Path | None = None
) -> Run:
    """Begins a run; one that records nothing when MLflow is off or its store cannot be used.

    In the file `note` the run stands until its end is known; one that stands there already was
    killed, for the caller owns the folder, and its end is sent to the store first.
    """
    if not options.mlflow:
        return NullRun()
    uri, experiment = store_uri(options), experiment_name(options)
    guard = Guard(uri)
    noted = Note(note) if note else None
    runs: list[Run] = []

    def begin() -> None:
        store = MlflowStore(uri)
        place = store.experiment_id(experiment)
        labels = {**version_tags(), **tags}
        if noted:
            if before := noted.settle(store, uri):
                labels[GOES_ON_TAG] = before
            labels[KEY_TAG] = noted.begin(uri, experiment)
        run_id = store.create_run(place, name=redacted(options.run_name or name), tags=labels)
        runs.append(MlflowRun(store, run_id, guard, noted))

    guard.call(begin)
    return runs[0] if runs else NullRun()


def settle_noted(options: TrackingOptions, note: Path) -> None:
    """Sends the store the end of a run that was killed, if a note names one."""
    if not (options.mlflow and note.exists()):
        return
    uri = store_uri(options)
    Guard(uri).call(lambda: Note(note).settle(MlflowStore(uri), uri))


def store_uri(options: TrackingOptions) -> str:
    """Where runs are recorded: what the config says, else the environment, else a local file."""
    return options.uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def experiment_name(options: TrackingOptions) -> str:
    """What the config says, else the environment, else the default."""
    default = TrackingOptions().experiment
    if options.experiment != default:
        return redacted(options.experiment)
    return redacted(os.environ.get("MLFLOW_EXPERIMENT_NAME") or default)


def version_tags() -> dict[str, str]:
    """What the numbers of a run may depend on."""
    tags = {"align.version": __version__}
    for package in ("torch", "transformers", "deepspeed"):
        try:
            tags[f"{package}.version"] = version(package)
        except PackageNotFoundError:
            continue
    return tags


class MlflowRun:
    """One run; when its store fails, what follows is not recorded and the work goes on."""

    def __init__(
        self, store: MlflowStore, run_id: str, guard: Guard, note: Note | None = None
    ) -> None:
        self._store = store
        self._guard = guard
        self._note = note
        self._params: dict[str, str] = {}
        self._is_over = False
        self.run_id = run_id

    def log_params(self, params: Mapping[str, str]) -> None:
        """Settings, flat; a store keeps the first value, so a later one becomes a tag."""
        fresh, changed = sorted_out(params, self._params)
        self._params |= fresh
        self._call(lambda: self._store.log_params(self.run_id, fresh))
        if changed:
            self.set_tags(changed)

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Numbers at one step, in one request."""
        if self._guard.is_out_of_patience():
            return
        now = time.time_ns() // 1_000_000
        points = [MetricPoint(name, float(value), step, now) for name, value in metrics.items()]
        self._call(lambda: self._store.log_metrics(self.run_id, points))

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """The data that went in, under our own digest."""
        note = DatasetNote(name, digest, source, context)
        self._call(lambda: self._store.log_dataset(self.run_id, note))

    def log_artifact(self, path: Path) -> None:
        """A file to keep with the run."""
        self._call(lambda: self._store.log_artifact(self.run_id, path))

    def log_model_link(self, folder: Path, *, tags: Mapping[str, str]) -> None:
        """Where the model lies that this run made."""
        link = ModelLink(str(folder.resolve()), dict(tags), "")
        self._call(lambda: self._store.link_model(self.run_id, link))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Labels to search by."""
        self._call(lambda: self._store.set_tags(self.run_id, tags))

    def sync(self) -> None:
        """Nothing: each call has been answered."""

    def finish(self, status: Status) -> None:
        """The truth about how it ended; the first word counts."""
        if self._is_over:
            return
        self._is_over = True
        is_told = self._guard.call(lambda: self._store.finish(self.run_id, status))
        self._guard.close()
        if self._note:
            self._note.remove() if is_told else self._note.end(status)

    def _call(self, action: Callable[[], object]) -> None:
        self._guard.call(action)


def sorted_out(
    params: Mapping[str, str], known: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The settings that are new, and those that changed, as tags."""
    values = {key_of(name): shortened(str(value), MAX_PARAM) for name, value in params.items()}
    fresh = {name: value for name, value in values.items() if name not in known}
    changed = {f"changed.{k}": v for k, v in values.items() if known.get(k, v) != v}
    return fresh, changed


@contextmanager
def recorded(
    options: TrackingOptions, stage: str, *, is_recorded: bool, note: Path | None = None
) -> Iterator[Run]:
    """Opens a run in the tracking store, or one that records nothing.

    Whoever owns the folder of `note` learns from it which run of this kind was killed there.
    """
    run = _open(options, stage, note) if is_recorded and options.mlflow else NullRun()
    try:
        yield run
    except (Interrupted, KeyboardInterrupt):
        run.finish("KILLED")
        raise
    except BaseException:
        run.finish("FAILED")
        raise
    run.finish("FINISHED")


def settle(options: TrackingOptions, note: Path) -> None:
    """Sends the store the end of a run that was killed; the folder has to be owned."""
    if options.mlflow and note.exists():
        settle_noted(options, note)


def _open(options: TrackingOptions, stage: str, note: Path | None) -> Run:
    return open_run(options, name=stage, tags={"align.stage": stage}, note=note)
