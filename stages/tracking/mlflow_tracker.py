"""The MLflow tracker. No other module opens an MLflow store; MLflow is imported on first use."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ...schemas.config import TrackingOptions
from ...schemas.errors import StorageError, log_failure
from ...schemas.json_codec import digest
from ..storage.disk import fs
from .metrics_log import EVAL, MetricsLine, key_of, read_metrics
from .mlflow_silence import ENVIRONMENT, NOISY
from .mlflow_sqlite import artifacts_beside, make_store, sqlite_file, with_absolute_path
from .run_record import KEY_TAG, PARENT_TAG, REPLACES_TAG, Dataset, RunFacts, Sent
from .tracker import Tracker

T = TypeVar("T")
Point = tuple[str, int]  # metric name, step
Number = tuple[str, int, int]  # metric name, step, time in ms

DEFAULT_URI = "sqlite:///mlflow.db"
PER_CALL = 100  # parameters, tags or data sets in one request
METRICS_PER_CALL = 1000
# MLflow's limits; where they differ between versions, those of its oldest SQL schema.
MAX_PARAM, MAX_TAG, MAX_NAME, MAX_DIGEST = 6000, 5000, 500, 36
MAX_FIELD = 2**31 - 1  # characters of a CSV field; a long prompt exceeds Python's default
PATH_TAG = "align.path"
STEP_TAG = "align.step"  # the step of a model
# MLflow's own tags.
NOTE_TAG = "mlflow.note.content"  # the description of a run
KIND_TAG = "mlflow.experimentKind"  # selects the view of an experiment
TABLES_TAG = "mlflow.loggedArtifacts"  # the artifacts that MLflow shows as tables
TRAINING_KIND = "custom_model_development"

ANSWERS, EVALUATIONS = "answers.jsonl", "evaluations"
FIRST_COLUMNS = ("prompt", "before", "after")  # of answers, to compare them side by side
# Text columns of evaluations.
TEXTS = {"set", "row_id", "prompt_key", "role", "prompt", "completion"}


class MlflowTracker(Tracker):
    """A run in an MLflow store; a missing local store is created."""

    title = "MLflow"
    named_by = "tracking.uri of the align.yaml here, MLFLOW_TRACKING_URI, or mlflow.db here"
    experiment_variable = "MLFLOW_EXPERIMENT_NAME"
    environment = ENVIRONMENT
    noisy = NOISY

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._mlflow = importlib.import_module("mlflow")
        self._exceptions = importlib.import_module("mlflow.exceptions")
        self._entities = self._mlflow.entities
        engines = importlib.import_module("mlflow.store.db.db_types").DATABASE_ENGINES
        if uri.partition(":")[0].partition("+")[0] in engines:
            importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
        self._run_id = ""
        self._parent = ""
        self._metrics = Path()
        self._stored: set[Number | Point] | None = None  # numbers in the store; None: not read

    @staticmethod
    def address_of(options: TrackingOptions, home: Path) -> str:
        """The tracking URI from the settings, else the environment, else a local file."""
        return options.uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI

    @staticmethod
    def plain_address(address: str) -> str:
        """The address without secrets, as an absolute path if it is a file."""
        path = sqlite_file(address)
        return f"sqlite:///{path.absolute()}" if path else Tracker.plain_address(address)

    @cached_property
    def client(self) -> Any:
        """MLflow's client; the store is created first if necessary."""
        uri = with_absolute_path(self.address)
        make_store(uri, self._mlflow.MlflowClient)
        return self._mlflow.MlflowClient(uri)

    def has(self, facts: RunFacts, run_id: str) -> bool:
        """Whether the store has this run and it is not deleted."""
        found = self._run(run_id)
        return found is not None and found.info.lifecycle_stage == "active"

    def begin(self, facts: RunFacts, sent: Sent, metrics: Path) -> Sent:
        """Finds or creates the run."""
        self._metrics, self._stored = metrics, None
        experiment = self._experiment_id(facts.stores["mlflow"].experiment)
        run_id = sent.run_id or self._find_run(experiment, facts.key)
        if not run_id:
            run_id = self._make_run(facts, experiment)
        elif not facts.status:
            self.client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        return Sent(run_id, sent.offset, sent.files)

    def log(self, lines: Sequence[MetricsLine]) -> None:
        """Sends the numbers that the store lacks; a repeated step keeps its first numbers."""
        if self._stored is None:  # also after a failed call, whose numbers may have arrived
            self._stored = self._stored_numbers(first_step=min(line.step for line in lines))
        stored, self._stored = self._stored, None
        metrics = [
            self._entities.Metric(name, line.metrics[name], when, step)
            for line in lines
            for name, step, when in _numbers(line)
            if not {(name, step), (name, step, when)} & stored
        ]
        for batch in _batches(metrics, METRICS_PER_CALL):
            self.client.log_batch(self._run_id, metrics=batch)
        self._stored = stored

    def label(self, facts: RunFacts) -> None:
        """Sends parameters, tags, data, models and status; an existing description is kept."""
        make, run = self._entities, self.client.get_run(self._run_id)
        tags = {key_of(name): value for name, value in facts.tags.items()}
        if facts.description and not run.data.tags.get(NOTE_TAG):
            tags[NOTE_TAG] = facts.description
        key = facts.tags.get(PARENT_TAG)
        if key and not self._parent:
            self._parent = self._find_run(run.info.experiment_id, key)
        if self._parent:
            tags["mlflow.parentRunId"] = self._parent
        params = [make.Param(key_of(name), _cut(v, MAX_PARAM)) for name, v in facts.params.items()]
        for batch in _batches(params, PER_CALL):
            self.client.log_batch(self._run_id, params=batch)
        made = [make.RunTag(name, _cut(value, MAX_TAG)) for name, value in tags.items()]
        for batch in _batches(made, PER_CALL):
            self.client.log_batch(self._run_id, tags=batch)
        for data in _batches([self._dataset(one) for one in facts.datasets], PER_CALL):
            self.client.log_inputs(self._run_id, data)
        if facts.status:
            self.client.set_terminated(self._run_id, facts.status, facts.ended_ms)
        for folder, model_tags in facts.models.items():
            self._link_model(folder, model_tags)

    def file(self, path: Path, folder: str) -> None:
        """Uploads a file or folder; some files also as tables for MLflow's pages.

        `log_dict` replaces a table, while MLflow's own `log_table` would append to it.
        """
        self.client.log_artifact(self._run_id, str(path), folder or None)
        table = None
        with log_failure(f"MLflow shows no table of {path}"):
            table = table_of(path)
        if table:
            name = str(PurePosixPath(folder, f"{path.stem}.json"))
            self.client.log_dict(self._run_id, table, name)
            tables = self.client.get_run(self._run_id).data.tags.get(TABLES_TAG, "")
            self.client.set_tag(self._run_id, TABLES_TAG, with_table(tables, name))

    def register(self, run_id: str, folder: Path, name: str, alias: str) -> tuple[str, bool]:
        """Uploads a model folder to its run and registers it as a version, unless it is one.

        Returns the version number and whether it is new. The artifact path contains a hash of the
        files, so a longer training never overwrites the files of an earlier version.
        """
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        content = digest([[str(path.relative_to(folder)), fs.sha256_of(path)] for path in files])
        at = f"{folder.name}-{content[:16]}"
        source = f"{self.client.get_run(run_id).info.artifact_uri.rstrip('/')}/{at}"
        known = self.client.search_model_versions(f"run_id = '{run_id}'")
        found: Any = next((one for one in known if (one.name, one.source) == (name, source)), None)
        is_new = found is None
        if is_new:
            self.client.log_artifacts(run_id, str(folder), at)
            try:
                self.client.create_registered_model(name)
            except self._exceptions.MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = self.client.create_model_version(
                name, source, run_id=run_id, await_creation_for=0
            )
        if alias:
            self.client.set_registered_model_alias(name, alias, str(found.version))
        return str(found.version), is_new

    def _stored_numbers(self, *, first_step: int) -> set[Number | Point]:
        """The numbers in the store from `first_step` on, and the points of repeated steps.

        A number in the store that metrics.jsonl lacks belongs to a step that was trained again.
        Its point is returned without a time, so that the store keeps the first number.
        """
        stored: set[Number] = set()
        for name in self.client.get_run(self._run_id).data.metrics:
            for point in self.client.get_metric_history(self._run_id, name):
                if point.step >= first_step:
                    stored.add((name, point.step, point.timestamp))
        logged = {one for line in read_metrics(self._metrics) for one in _numbers(line)}
        return {*stored, *((name, step) for name, step, _ in stored - logged)}

    def _make_run(self, facts: RunFacts, experiment: str) -> str:
        if before := facts.tags.get(REPLACES_TAG):
            found = self._run(self._find_run(experiment, before))
            if found is not None and found.info.status == "RUNNING":
                self.client.set_terminated(found.info.run_id, "KILLED", None)
        context = importlib.import_module("mlflow.tracking.context.registry")
        tags = context.resolve_tags({KEY_TAG: facts.key})  # MLflow adds the user and the source
        run = self.client.create_run(
            experiment, start_time=facts.began_ms, tags=tags, run_name=facts.name or None
        )
        if not run.info.run_id:  # another server may answer `{}` to every request
            raise StorageError("it created no run; is there an MLflow server at this address?")
        self._stored = set()
        return str(run.info.run_id)

    def _experiment_id(self, name: str) -> str:
        """The id of an experiment, which is created if it does not exist."""
        found = self.client.get_experiment_by_name(name)
        if found is None:
            where = artifacts_beside(self.address, name)
            kind = {KIND_TAG: TRAINING_KIND}
            try:
                return str(self.client.create_experiment(name, artifact_location=where, tags=kind))
            except self._exceptions.MlflowException:
                # Another process may have created it in the meantime.
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        if KIND_TAG not in found.tags:
            self.client.set_experiment_tag(found.experiment_id, KIND_TAG, TRAINING_KIND)
        return str(found.experiment_id)

    def _find_run(self, experiment: str, key: str) -> str:
        """The id of the run with this key; empty if there is none."""
        found = self.client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
        return str(found[0].info.run_id) if found else ""

    def _run(self, run_id: str) -> Any:
        try:
            return self.client.get_run(run_id) if run_id else None
        except self._exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _dataset(self, data: Dataset) -> Any:
        """An input data set; MLflow's digest field is short, so the full digest is a tag."""
        make = self._entities
        dataset = make.Dataset(
            name=_cut(data.name, MAX_NAME),
            digest=data.digest[:MAX_DIGEST],
            source_type="local",
            source=json.dumps({"uri": data.source}),
        )
        tags = {"mlflow.data.context": data.context, "align.digest": data.digest}
        return make.DatasetInput(dataset, [make.InputTag(*tag) for tag in tags.items()])

    def _link_model(self, folder: str, tags: dict[str, str]) -> None:
        """Adds an external logged model (its path and metrics) to the run's outputs."""
        run = self.client.get_run(self._run_id)
        step = tags.get(STEP_TAG, "0")
        own = self.client.search_logged_models(
            [run.info.experiment_id], f"source_run_id = '{self._run_id}'"
        )
        identity = {PATH_TAG: folder, STEP_TAG: tags.get(STEP_TAG)}
        same = (one for one in own if all(one.tags.get(k) == v for k, v in identity.items()))
        model = next(same, None) or self.client.create_logged_model(
            run.info.experiment_id,
            name=Path(folder).name,
            source_run_id=self._run_id,
            tags={"mlflow.model.isExternal": "true", PATH_TAG: folder, **tags},
        )
        if model.status != self._entities.LoggedModelStatus.READY:
            self.client.finalize_logged_model(model.model_id, "READY")
        if measured := self._eval_metrics(run, model.model_id, int(step)):
            self.client.log_batch(self._run_id, metrics=measured)
        outputs = run.outputs.model_outputs if run.outputs else []
        if model.model_id not in {one.model_id for one in outputs}:  # MLflow refuses a second one
            output = self._entities.LoggedModelOutput(model.model_id, int(step))
            self.client.log_outputs(self._run_id, [output])

    def _eval_metrics(self, run: Any, model_id: str, step: int) -> list[Any]:
        """The evaluation's metrics at a step as metrics of the model, by which MLflow ranks models.

        Value, step and time equal the run's, so MLflow stores one number for both.
        """
        inputs = run.inputs.dataset_inputs if run.inputs else []
        by_context = {tag.value: one.dataset for one in inputs for tag in one.tags}
        usual = by_context.get("evaluation") or by_context.get("training")
        make, found = self._entities.Metric, []
        for key in sorted(name for name in run.data.metrics if name.startswith(EVAL)):
            data = by_context.get(f"evaluation {key.split('/')[1]}", usual)
            of_data = (data.name, data.digest) if data else (None, None)
            for point in self.client.get_metric_history(self._run_id, key):
                if point.step == step:
                    values = (key, point.value, point.timestamp, step, model_id)
                    found.append(make(*values, *of_data, self._run_id))
        return found


def table_of(path: Path) -> dict[str, Any] | None:
    """The columns and rows of a file that MLflow shows as a table; None for other files."""
    if path.name == ANSWERS:
        # Bytes, because `str.splitlines` would also split at U+2028.
        rows = [*map(json.loads, path.read_bytes().splitlines())]
        columns = [*FIRST_COLUMNS, *sorted({*rows[0]} - {*FIRST_COLUMNS})] if rows else []
    elif path.parent.name == EVALUATIONS and path.suffix == ".csv":
        limit = csv.field_size_limit(MAX_FIELD)  # it holds for the whole process
        try:
            with path.open(newline="", encoding="utf-8") as source:
                rows = [*csv.DictReader(source)]
        finally:
            csv.field_size_limit(limit)
        columns = [*rows[0]] if rows else []
        for row in rows:
            for name in {*columns} - TEXTS:
                number = float(row[name])
                row[name] = number if math.isfinite(number) else None  # JSON has no NaN
    else:
        return None
    return {"columns": columns, "data": [[row[name] for name in columns] for row in rows]}


def with_table(tag: str, file: str) -> str:
    """The tag that lists a run's tables, with one added; the oldest are dropped if it is full."""
    entry = {"path": file, "type": "table"}
    tables = [*(one for one in json.loads(tag or "[]") if one != entry), entry]
    while len(text := json.dumps(tables)) > MAX_TAG:
        tables = tables[1:]
    return text


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _numbers(line: MetricsLine) -> Iterator[Number]:
    """The name, step and time of each number of a line."""
    return ((name, line.step, round(1000 * line.time)) for name in line.metrics)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


TRACKER = MlflowTracker
