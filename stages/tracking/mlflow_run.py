"""Runs in MLflow; the only module that imports it, and only once a run is to be recorded."""

from __future__ import annotations

import importlib
import json
import os
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from ... import __version__
from ...schemas.config import TrackingOptions
from .fast_sqlite import created_quickly
from .guard import Guard
from .names import MAX_DATASET_NAME, MAX_DIGEST, MAX_PARAM, MAX_TAG, key_of, shortened
from .null_run import NullRun
from .quiet import hush

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ...schemas.tracking import Run, Status

T = TypeVar("T")

DEFAULT_URI = "sqlite:///mlflow.db"
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000


def open_run(options: TrackingOptions, *, name: str, tags: Mapping[str, str]) -> Run:
    """Begins a run; one that records nothing when MLflow is off or its store cannot be used."""
    if not options.mlflow:
        return NullRun()
    hush()
    uri = options.uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
    guard = Guard(uri)
    run = MlflowRun(guard)
    guard.call(lambda: run.begin(uri, options, name=name, tags=tags))
    return run if run.run_id else NullRun()


class MlflowRun:
    """One run; when its store fails, what follows is not recorded and the work goes on."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._client: Any = None
        self._entities: Any = None
        self._params: dict[str, str] = {}
        self.run_id = ""

    def begin(
        self, uri: str, options: TrackingOptions, *, name: str, tags: Mapping[str, str]
    ) -> None:
        """Finds or makes the store and the experiment, and a new run in it."""
        mlflow = importlib.import_module("mlflow")
        context = importlib.import_module("mlflow.tracking.context.registry")
        self._entities = mlflow.entities
        with created_quickly(uri):
            self._client = mlflow.MlflowClient(uri)
        experiment = _experiment_id(self._client, _experiment_name(options))
        every = {**_version_tags(), **tags}
        labels = context.resolve_tags({key_of(k): shortened(v, MAX_TAG) for k, v in every.items()})
        run_name = options.run_name or name or None
        self.run_id = self._client.create_run(
            experiment, tags=labels, run_name=run_name
        ).info.run_id

    def log_params(self, params: Mapping[str, str]) -> None:
        """Settings, flat; a store keeps the first value, so a later one becomes a tag."""
        values = {key_of(name): shortened(str(value), MAX_PARAM) for name, value in params.items()}
        fresh = {name: value for name, value in values.items() if name not in self._params}
        changed = {f"changed.{k}": v for k, v in values.items() if self._params.get(k, v) != v}
        self._params |= fresh
        entities = [self._entities.Param(name, value) for name, value in fresh.items()]
        for batch in _batches(entities, PARAMS_PER_BATCH):
            self._log_batch(params=batch)
        if changed:
            self.set_tags(changed)

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Numbers at one step, in one request."""
        if self._guard.is_out_of_patience():
            return
        now = time.time_ns() // 1_000_000
        entities = [
            self._entities.Metric(key_of(name), float(value), now, step)
            for name, value in metrics.items()
        ]
        for batch in _batches(entities, METRICS_PER_BATCH):
            self._log_batch(metrics=batch)

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """The data that went in; MLflow's own field is short, so the whole digest is a tag."""
        entities = self._entities
        dataset = entities.Dataset(
            name=shortened(name, MAX_DATASET_NAME),
            digest=digest[:MAX_DIGEST],
            source_type="local",
            source=json.dumps({"uri": source}),
        )
        tags = {"mlflow.data.context": context, "align.digest": digest}
        labelled = entities.DatasetInput(dataset, [entities.InputTag(*tag) for tag in tags.items()])
        self._guard.call(lambda: self._client.log_inputs(self.run_id, [labelled]))

    def log_artifact(self, path: Path) -> None:
        """A file to keep with the run."""
        self._guard.call(lambda: self._client.log_artifact(self.run_id, str(path)))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Labels to search by."""
        make = self._entities.RunTag
        entities = [make(key_of(name), shortened(value, MAX_TAG)) for name, value in tags.items()]
        for batch in _batches(entities, PARAMS_PER_BATCH):
            self._log_batch(tags=batch)

    def finish(self, status: Status) -> None:
        """The truth about how it ended; the first word counts."""
        self._guard.call(lambda: self._client.set_terminated(self.run_id, status))
        self._guard.close()

    def _log_batch(self, **entities: Sequence[Any]) -> None:
        self._guard.call(lambda: self._client.log_batch(self.run_id, **entities))


def _experiment_name(options: TrackingOptions) -> str:
    default = TrackingOptions().experiment
    if options.experiment != default:
        return options.experiment
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or default


def _experiment_id(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except importlib.import_module("mlflow.exceptions").MlflowException:
            # Another process may have made it in the meantime.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _version_tags() -> dict[str, str]:
    tags = {"align.version": __version__}
    for package in ("torch", "transformers"):
        try:
            tags[f"{package}.version"] = version(package)
        except PackageNotFoundError:
            continue
    return tags


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
