"""MLflow as a tracker; the only module that opens a store of it, and imports it then."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ...schemas.config import TrackingOptions
from ...schemas.errors import StorageError
from ...schemas.safe_text import redacted
from .journal import (
    EVAL,
    MAX_DATASET_NAME,
    MAX_DIGEST,
    MAX_PARAM,
    MAX_TAG,
    Entry,
    MetricPoint,
    key_of,
    shortened,
)
from .mlflow_silence import mlflow_silenced
from .mlflow_sqlite import artifacts_beside, make_store, require_whole, sqlite_file
from .mlflow_tables import TAG as TABLES_TAG
from .mlflow_tables import table_of, with_table
from .tracker import (
    GOES_ON_TAG,
    KEY_TAG,
    DatasetNote,
    ModelLink,
    RunRecord,
    TrackerKind,
    plain_address,
)

T = TypeVar("T")

PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
INPUTS_PER_BATCH = 100
PATH_TAG = "align.path"
STEP_TAG = "align.step"  # after which a model was written
NOTE_TAG = "mlflow.note.content"
KIND_TAG = "mlflow.experimentKind"  # by which MLflow's pages choose what they open with
TRAINING_KIND = "custom_model_development"
DEFAULT_URI = "sqlite:///mlflow.db"


class MlflowTracker:
    """One run in one store, which is made when it is a local one that is not there yet.

    Open it inside `mlflow_silenced`, for MLflow reads the environment when it is imported.
    """

    def __init__(self, uri: str) -> None:
        mlflow = importlib.import_module("mlflow")
        self._entities = mlflow.entities
        make_store(uri, mlflow.MlflowClient)
        try:
            self.client: Any = mlflow.MlflowClient(uri)
        except Exception as error:
            require_whole(uri, error)
            raise
        self._run_id = ""
        self._params: set[tuple[str, str]] = set()  # sent, as are the next two
        self._tags: set[tuple[str, str]] = set()
        self._datasets: set[DatasetNote] = set()
        self._known: dict[str, set[int]] | None = None  # None: to be asked for
        self._ceiling = -1
        self._end = 0  # of the last line that was tried

    def begin(self, record: RunRecord) -> str:
        """The id of the run, which is found or made; empty if the store has lost it."""
        if record.run_id and not self._has_run(record.run_id, key=record.key):
            return ""
        self._run_id = record.run_id or self._make_run(record)
        self._params, self._tags, self._datasets = set(), set(), set()
        if record.run_id and not record.status:
            self.client.update_run(self._run_id, status="RUNNING")
        return self._run_id

    def label(self, record: RunRecord) -> None:
        """Parameters, tags and data that this object has not sent; a person may edit a tag since.

        A parameter under another value makes the store refuse.
        """
        news = {*record.params.items()} - self._params
        make = self._entities.Param
        params = [make(key_of(k), shortened(str(v), MAX_PARAM)) for k, v in sorted(news)]
        for batch in _batches(params, PARAMS_PER_BATCH):
            self.client.log_batch(self._run_id, params=batch)
        self._params |= news
        news = {*record.tags.items()} - self._tags
        make = self._entities.RunTag
        tags = [make(key_of(name), shortened(v, MAX_TAG)) for name, v in sorted(news)]
        if any(tag.key == NOTE_TAG for tag in tags) and self._has_note():
            tags = [tag for tag in tags if tag.key != NOTE_TAG]
        for batch in _batches(tags, PARAMS_PER_BATCH):
            self.client.log_batch(self._run_id, tags=batch)
        self._tags |= news
        notes = [note for note in record.datasets if note not in self._datasets]
        for batch in _batches(notes, INPUTS_PER_BATCH):
            self.client.log_inputs(self._run_id, [self._dataset(note) for note in batch])
        self._datasets.update(notes)

    def _has_note(self) -> bool:
        """Whether the run has a description, which a person may have edited since it was sent."""
        return bool(self.client.get_run(self._run_id).data.tags.get(NOTE_TAG))

    def log(self, entries: Sequence[Entry]) -> int:
        """The numbers that the store lacks: of a step that was trained again it keeps the first."""
        points = [point for entry in entries for point in entry.points]
        if entries[0].end <= self._end:
            self._known = None  # what was sent last may have arrived
        self._learn_what_is_known(points)
        self._end = entries[-1].end
        missing = [point for point in points if not self._is_known(point)]
        make = self._entities.Metric
        metrics = [make(key_of(p.key), p.value, p.time_ms, p.step) for p in missing]
        for batch in _batches(metrics, METRICS_PER_BATCH):
            self.client.log_batch(self._run_id, metrics=batch)
        return len(missing)

    def artifact(self, path: Path, *, under: str) -> None:
        """A file, or a folder with all in it; some files also as a table for MLflow's pages."""
        self.client.log_artifact(self._run_id, str(path), under or None)
        if table := table_of(path):
            file = str(PurePosixPath(under, f"{path.stem}.json"))
            self.client.log_dict(self._run_id, table, file)
            named = self.client.get_run(self._run_id).data.tags.get(TABLES_TAG, "")
            self.client.set_tag(self._run_id, TABLES_TAG, with_table(named, file))

    def model(self, link: ModelLink) -> str:
        """The id of a logged model that is the path of ours."""
        run = self.client.get_run(self._run_id)
        model = self._logged_model(run.info.experiment_id, link)
        if model.status != self._entities.LoggedModelStatus.READY:
            self.client.finalize_logged_model(model.model_id, "READY")
        outputs = run.outputs.model_outputs if run.outputs else []
        step = int(link.tags.get(STEP_TAG, 0))
        if measured := self._held_out(run, model.model_id, step):
            self.client.log_batch(self._run_id, metrics=measured)
        if model.model_id not in {one.model_id for one in outputs}:  # it can be told once only
            output = self._entities.LoggedModelOutput(model.model_id, step)
            self.client.log_outputs(self._run_id, [output])
        return str(model.model_id)

    def _held_out(self, run: Any, model_id: str, step: int) -> list[Any]:
        """What was measured of the model on held-out rows, and on which: MLflow ranks models by it.

        These are numbers of the run, to the millisecond: MLflow keeps one for both.
        """
        inputs = run.inputs.dataset_inputs if run.inputs else []
        by_context = {tag.value: one.dataset for one in inputs for tag in one.tags}
        data = by_context.get("evaluation") or by_context.get("training")
        name, digest = (data.name, data.digest) if data else (None, None)
        make = self._entities.Metric
        return [
            make(key, point.value, point.timestamp, step, model_id, name, digest, self._run_id)
            for key in sorted(run.data.metrics)
            if key.startswith(EVAL)
            for point in self.client.get_metric_history(self._run_id, key)
            if point.step == step
        ]

    def end(self, status: str, ended_ms: int) -> None:
        """Sets the final status of the run."""
        self.client.set_terminated(self._run_id, status, ended_ms)

    def _make_run(self, record: RunRecord) -> str:
        experiment = self._experiment_id(record.experiment)
        if found := self._find_run(experiment, key=record.key):
            return found
        if before := record.tags.get(GOES_ON_TAG):
            self._end_if_running(before)
        context = importlib.import_module("mlflow.tracking.context.registry")
        own = {key_of(name): value for name, value in record.tags.items()}
        tags = context.resolve_tags({**own, KEY_TAG: record.key})  # and who made it
        run = self.client.create_run(
            experiment,
            start_time=record.began_ms,
            tags={name: shortened(str(value), MAX_TAG) for name, value in tags.items()},
            run_name=record.run_name or None,
        )
        if not run.info.run_id:  # as of a server that answers `{}` to everything
            raise StorageError("it made no run; is there an MLflow server at this address?")
        self._known = {}
        return str(run.info.run_id)

    def _experiment_id(self, name: str) -> str:
        """The experiment of that name, made when there is none; of this kind unless it has one."""
        kind = {KIND_TAG: TRAINING_KIND}
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                where = artifacts_beside(self.client.tracking_uri, name)
                return str(self.client.create_experiment(name, artifact_location=where, tags=kind))
            except importlib.import_module("mlflow.exceptions").MlflowException:
                # Another process may have made it in the meantime.
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        if KIND_TAG not in found.tags:
            self.client.set_experiment_tag(found.experiment_id, KIND_TAG, TRAINING_KIND)
        return str(found.experiment_id)

    def _find_run(self, experiment: str, *, key: str) -> str:
        """The id of the run that has this key, empty when there is none."""
        wanted = f"tags.`{KEY_TAG}` = '{key}'"
        found = self.client.search_runs([experiment], wanted, max_results=1)
        return str(found[0].info.run_id) if found else ""

    def _has_run(self, run_id: str, *, key: str) -> bool:
        """Whether the store has such a run under this key, and it was not deleted."""
        found = self._run(run_id)
        if found is None or found.data.tags.get(KEY_TAG) != key:
            return False
        return bool(found.info.lifecycle_stage == "active")

    def _end_if_running(self, run_id: str) -> None:
        """Ends a run as killed if MLflow believes that it still runs."""
        found = self._run(run_id)
        if found is not None and found.info.status == "RUNNING":
            self.client.set_terminated(run_id, "KILLED", None)

    def _run(self, run_id: str) -> Any:
        exceptions = importlib.import_module("mlflow.exceptions")
        try:
            return self.client.get_run(run_id)
        except exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _dataset(self, note: DatasetNote) -> Any:
        """The data that went in; MLflow's own field is short, so the whole digest is a tag."""
        entities = self._entities
        dataset = entities.Dataset(
            name=shortened(note.name, MAX_DATASET_NAME),
            digest=note.digest[:MAX_DIGEST],
            source_type="local",
            source=json.dumps({"uri": redacted(note.source)}),
        )
        tags = {"mlflow.data.context": note.context, "align.digest": note.digest}
        return entities.DatasetInput(dataset, [entities.InputTag(*tag) for tag in tags.items()])

    def _logged_model(self, experiment: str, link: ModelLink) -> Any:
        """The model of this path and step, made when there is none."""
        known = {PATH_TAG: link.folder, STEP_TAG: link.tags.get(STEP_TAG)}
        own = f"source_run_id = '{self._run_id}'"
        for model in self.client.search_logged_models([experiment], own):
            if all(model.tags.get(name) == value for name, value in known.items()):
                return model
        tags = {"mlflow.model.isExternal": "true", PATH_TAG: link.folder, **link.tags}
        return self.client.create_logged_model(
            experiment,
            name=Path(link.folder).name,
            source_run_id=self._run_id,
            tags={name: shortened(value, MAX_TAG) for name, value in tags.items()},
        )

    def _learn_what_is_known(self, points: Sequence[MetricPoint]) -> None:
        if self._known is None and points:
            self._known = self._points_known(least=min(point.step for point in points))
            self._ceiling = max((max(steps) for steps in self._known.values() if steps), default=-1)
        if points and points[0].step > self._ceiling:
            self._known = {}  # all from here on is new

    def _points_known(self, *, least: int) -> dict[str, set[int]]:
        """Metric -> step of each number that the store has, from step `least` on."""
        keys = self.client.get_run(self._run_id).data.metrics
        return {
            key: {
                point.step
                for point in self.client.get_metric_history(self._run_id, key)
                if point.step >= least
            }
            for key in keys
        }

    def _is_known(self, point: MetricPoint) -> bool:
        assert self._known is not None, "asked for before"
        return point.step in self._known.get(point.key, ())


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def store_uri(options: TrackingOptions, _: Path) -> str:
    """The tracking URI of the config, else the environment, else a local file."""
    return options.uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def experiment_name(options: TrackingOptions) -> str:
    """The experiment of the config, else the environment, else the default."""
    default = TrackingOptions().experiment
    if options.experiment != default:
        return redacted(options.experiment)
    return redacted(os.environ.get("MLFLOW_EXPERIMENT_NAME") or default)


def plain_uri(uri: str) -> str:
    """The address without secrets, and the same from every folder."""
    path = sqlite_file(uri)
    return f"sqlite:///{path.absolute()}" if path else plain_address(uri)


def load(uri: str) -> None:
    """Imports what an address needs, inside `mlflow_silenced`; does not ask the store anything.

    Under a host that makes errors of warnings an import outside of it would fail halfway, and
    SQLAlchemy then refuses MLflow's mappers for as long as the process lives.
    """
    importlib.import_module("mlflow")
    engines = importlib.import_module("mlflow.store.db.db_types").DATABASE_ENGINES
    if uri.partition(":")[0].partition("+")[0] in engines:
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def failures() -> tuple[type[BaseException], ...]:
    """The exceptions of MLflow; a library that was never imported cannot have raised any."""
    named = (
        ("mlflow.exceptions", "MlflowException"),
        ("sqlalchemy.exc", "SQLAlchemyError"),
        ("alembic.util.exc", "CommandError"),
        ("urllib3.exceptions", "HTTPError"),
    )
    loaded = (getattr(sys.modules[module], name) for module, name in named if module in sys.modules)
    return (sqlite3.Error, *loaded)


KIND = TrackerKind(
    name="mlflow",
    title="MLflow",
    named_by="tracking.uri of the align.yaml here, MLFLOW_TRACKING_URI, or mlflow.db here",
    address=store_uri,
    open=MlflowTracker,
    experiment=experiment_name,
    plain=plain_uri,
    load=load,
    quiet=mlflow_silenced,
    failures=failures,
    parent_tag="mlflow.parentRunId",
    note_tag=NOTE_TAG,
)
