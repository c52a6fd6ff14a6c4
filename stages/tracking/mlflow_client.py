"""The calls to MLflow; the only module that imports it. Each of them raises when it fails.

A SQLite store that is not there yet is built under a draft's name, then given its own in one step.
MLflow builds one by some 350 statements, and a kill among them would leave a store that neither
works nor is ever repaired. Nothing is in a draft, so SQLite need not wait for the disk after each
statement: a second instead of six. A store that is there is never touched.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ...schemas.errors import StorageError
from ...schemas.safe_text import redacted
from ..storage import fs
from .journal import (
    MAX_DATASET_NAME,
    MAX_DIGEST,
    MAX_PARAM,
    MAX_TAG,
    DatasetNote,
    MetricPoint,
    ModelLink,
    key_of,
    shortened,
)

T = TypeVar("T")

PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
PATH_TAG = "align.path"
KEY_TAG = "align.run_key"  # by which a run is found whose id was never heard here
GOES_ON_TAG = "align.goes_on_from"  # the run that was given up for this one
GROUP_TAG = "align.sweep"  # the sweep's folder: it names the group where the parent is not known
ROUNDS_TAG = "align.rounds"  # likewise the folder of rounds
PARENT_TAG = "mlflow.parentRunId"


def load(uri: str) -> None:
    """Imports what an address needs, inside `mlflow_silenced`; does not ask the store anything.

    Under a host that makes errors of warnings an import outside of it would fail halfway, and
    SQLAlchemy then refuses MLflow's mappers for as long as the process lives.
    """
    importlib.import_module("mlflow")
    engines = importlib.import_module("mlflow.store.db.db_types").DATABASE_ENGINES
    if uri.partition(":")[0].partition("+")[0] in engines:
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


class MlflowStore:
    """One tracking store, made when it is a local one that is not there yet.

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

    def experiment_id(self, name: str) -> str:
        """The experiment of that name, made when there is none."""
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                where = artifacts_beside(self.client.tracking_uri, name)
                return str(self.client.create_experiment(name, artifact_location=where))
            except importlib.import_module("mlflow.exceptions").MlflowException:
                # Another process may have made it in the meantime.
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def create_run(
        self, experiment: str, *, name: str, tags: Mapping[str, str], began_ms: int | None = None
    ) -> str:
        """A new run, labelled with who made it as well; returns its id."""
        context = importlib.import_module("mlflow.tracking.context.registry")
        labels = context.resolve_tags({key_of(k): v for k, v in tags.items()})
        labels = {name: shortened(str(value), MAX_TAG) for name, value in labels.items()}
        run = self.client.create_run(
            experiment, start_time=began_ms, tags=labels, run_name=name or None
        )
        return str(run.info.run_id)

    def find_run(self, experiment: str, *, tag: str, value: str) -> str:
        """The id of the run that has a tag, empty when there is none."""
        found = self.client.search_runs([experiment], f"tags.`{tag}` = '{value}'", max_results=1)
        return str(found[0].info.run_id) if found else ""

    def has_run(self, run_id: str, *, key: str) -> bool:
        """Whether the store has such a run under this key, and it was not deleted."""
        found = self._run(run_id)
        if found is None or found.data.tags.get(KEY_TAG) != key:
            return False
        return bool(found.info.lifecycle_stage == "active")

    def end_if_running(self, run_id: str) -> None:
        """Ends a run as killed if MLflow believes that it still runs."""
        found = self._run(run_id)
        if found is not None and found.info.status == "RUNNING":
            self.finish(run_id, "KILLED")

    def _run(self, run_id: str) -> Any:
        exceptions = importlib.import_module("mlflow.exceptions")
        try:
            return self.client.get_run(run_id)
        except exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def reopen(self, run_id: str) -> None:
        """Sets a run going again."""
        self.client.update_run(run_id, status="RUNNING")

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Settings; one that the store has under another value makes it refuse."""
        make = self._entities.Param
        entities = [make(key_of(k), shortened(str(v), MAX_PARAM)) for k, v in params.items()]
        for batch in _batches(entities, PARAMS_PER_BATCH):
            self.client.log_batch(run_id, params=batch)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Labels; later ones replace earlier ones."""
        make = self._entities.RunTag
        entities = [make(key_of(name), shortened(value, MAX_TAG)) for name, value in tags.items()]
        for batch in _batches(entities, PARAMS_PER_BATCH):
            self.client.log_batch(run_id, tags=batch)

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Numbers, of any steps."""
        make = self._entities.Metric
        entities = [make(key_of(p.key), p.value, p.time_ms, p.step) for p in points]
        for batch in _batches(entities, METRICS_PER_BATCH):
            self.client.log_batch(run_id, metrics=batch)

    def points_known(self, run_id: str, *, least: int) -> dict[str, set[tuple[int, int]]]:
        """Metric -> step and time of each number that the store has, from step `least` on."""
        keys = self.client.get_run(run_id).data.metrics
        return {
            key: {
                (point.step, point.timestamp)
                for point in self.client.get_metric_history(run_id, key)
                if point.step >= least
            }
            for key in keys
        }

    def log_dataset(self, run_id: str, note: DatasetNote) -> None:
        """The data that went in; MLflow's own field is short, so the whole digest is a tag."""
        entities = self._entities
        dataset = entities.Dataset(
            name=shortened(note.name, MAX_DATASET_NAME),
            digest=note.digest[:MAX_DIGEST],
            source_type="local",
            source=json.dumps({"uri": redacted(note.source)}),
        )
        tags = {"mlflow.data.context": note.context, "align.digest": note.digest}
        labelled = entities.DatasetInput(dataset, [entities.InputTag(*tag) for tag in tags.items()])
        self.client.log_inputs(run_id, [labelled])

    def log_artifact(self, run_id: str, path: Path, *, under: str = "") -> None:
        """A file, or a folder with all in it."""
        self.client.log_artifact(run_id, str(path), under or None)

    def link_model(self, run_id: str, link: ModelLink) -> str:
        """A model that stays where it is; returns the store's name for it."""
        experiment = self.client.get_run(run_id).info.experiment_id
        made = self.client.search_logged_models([experiment], f"source_run_id = '{run_id}'")
        for model in made:
            if model.tags.get(PATH_TAG) == link.folder:
                return str(model.model_id)
        tags = {"mlflow.model.isExternal": "true", PATH_TAG: link.folder, **link.tags}
        tags = {name: shortened(value, MAX_TAG) for name, value in tags.items()}
        model = self.client.create_logged_model(
            experiment, name="model", source_run_id=run_id, tags=tags
        )
        self.client.finalize_logged_model(model.model_id, "READY")
        output = self._entities.LoggedModelOutput(model.model_id, 0)
        self.client.log_outputs(run_id, [output])
        return str(model.model_id)

    def finish(self, run_id: str, status: str, *, ended_ms: int | None = None) -> None:
        """The truth about how a run ended."""
        self.client.set_terminated(run_id, status, ended_ms)


def artifacts_beside(uri: str, experiment: str) -> str | None:
    """Where a SQLite file keeps what an experiment uploads: beside itself, in any folder.

    MLflow would put it below the folder that the first run is started from. None: it decides.
    """
    name = uri.removeprefix("sqlite:///").partition("?")[0]
    if not uri.startswith("sqlite:///") or not name:
        return None
    return str(Path(name).absolute().parent / "mlruns" / key_of(experiment))


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


WAIT_SECONDS = 20.0
_FILE = re.compile(r"(sqlite(?:\+pysqlite)?:///)([^?]+)(.*)", re.DOTALL)


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite address; None where it names no file that we could make."""
    found = _FILE.fullmatch(uri)
    if not found or found[2].startswith((":memory:", "file:")):
        return None
    return Path(found[2])


def make_store(uri: str, build: Callable[[str], object]) -> None:
    """Lets `build` make the store of a SQLite address under another one, unless it is there."""
    path = sqlite_file(uri)
    if path is None or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(path.parent) as is_alone:
        if path.exists():
            return
        if is_alone:
            _remove_drafts(path)
        with fs.draft_if_absent(path) as draft:
            with _unsynchronized():
                build(_FILE.sub(lambda found: f"{found[1]}{draft}{found[3]}", uri))
            fs.fsync(draft)


def require_whole(uri: str, error: Exception) -> None:
    """Says what to do with a SQLite store that MLflow cannot open for how it was made."""
    path = sqlite_file(uri)
    if path is None or (runs := _count_runs(path)) is None:
        return
    if runs:
        way = (
            f"It holds {runs:,} runs of another version of MLflow: keep a copy of it, then "
            f"`mlflow db upgrade {uri}`"
        )
    else:
        way = "It holds no run and was left half made. If no other program is making it, remove it"
    raise StorageError(f"{path} is not a whole store of this MLflow. {way}.") from error


def _count_runs(path: Path) -> int | None:
    """How many runs a store has, whole or not; None where the file is not a database."""
    try:
        with path.open("rb") as source:
            source.read(1)
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    except (OSError, sqlite3.Error):
        return None
    try:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if "runs" not in tables:
            return 0
        return int(database.execute("SELECT count(*) FROM runs").fetchone()[0])
    except sqlite3.Error:
        return None
    finally:
        database.close()


def _remove_drafts(path: Path) -> None:
    """Removes what a killed process left; the caller holds the lock."""
    for draft in path.parent.glob(f".{path.name}.*.tmp*"):
        if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp(-journal)?", draft.name):
            fs.unlink(draft)


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Keeps others who ask for the same out, as far as the file system can; whether it does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Waits for a lock no longer than building a store may take."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return False
        else:
            return True
    return False


@contextmanager
def _unsynchronized() -> Iterator[None]:
    """Connections opened inside do not wait for the disk; they are closed at its end."""
    event = importlib.import_module("sqlalchemy.event")
    engine = importlib.import_module("sqlalchemy.engine").Engine
    used: list[Any] = []

    def disable_fsync(connection: Any, _record: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")

    def note(connection: Any) -> None:
        used.append(connection.engine)

    event.listen(engine, "connect", disable_fsync)
    event.listen(engine, "engine_connect", note)
    try:
        yield
    finally:
        event.remove(engine, "connect", disable_fsync)
        event.remove(engine, "engine_connect", note)
        for one in used:
            with suppress(sqlite3.Error):
                one.dispose()
