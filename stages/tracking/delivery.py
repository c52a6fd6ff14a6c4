"""Brings MLflow up to what a run's ledger and journal say; doing it twice is doing it once."""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from ...schemas.errors import StorageError
from ...schemas.safe_text import redacted
from .journal import DatasetNote, MetricPoint, MlflowRecord, line_start, read_entries
from .mlflow_client import GOES_ON_TAG, KEY_TAG, METRICS_PER_BATCH, MlflowStore, load
from .mlflow_silence import mlflow_silenced
from .outbox import Ledger, address_of, failures, reason_of

logger = logging.getLogger("align")

SECONDS_PER_MARK = 10.0
PRIVATE = "_align/"  # a file that was copied there has no place in the run


class Delivery:
    """One store and one run; what is known to have arrived is not sent again."""

    def __init__(self, store: MlflowStore, ledger: Ledger, metrics: Path) -> None:
        self._store = store
        self._ledger = ledger
        self._metrics = metrics
        self._run_id = ""
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._datasets: set[DatasetNote] = set()
        self._status = ""
        self._sent = 0
        self._marked_at = time.monotonic()
        self._refused: set[str] = set()
        self._known: dict[str, set[tuple[int, int]]] | None = None  # None: to be asked for
        self._ceiling = -1
        self.points = 0  # sent by this delivery

    def deliver(self) -> None:
        """Sends what is missing; raises what the store raises, and continues there next time."""
        record = self._ledger.record  # with a status in it, nothing is added after this
        try:
            self._find_run()
            self._send_labels()
            self._send_metrics()
            self._send_status(record)
            self._send_artifacts()
            self._send_models()
        except BaseException:
            self._known = None  # what was sent last may have arrived
            raise
        finally:
            self._mark()

    @property
    def is_complete(self) -> bool:
        """Whether the store knows all, and how the run ended."""
        record = self._ledger.record
        is_told = bool(record.status) and self._status == record.status
        linked = all(link.model_id for link in record.models)
        return is_told and linked and not list(self._owed())

    def _find_run(self) -> None:
        if self._run_id:
            return
        record = self._ledger.record
        if record.run_id and not self._store.has_run(record.run_id, key=record.key):
            self._ledger.forget_run()
            record = self._ledger.record
        self._run_id = record.run_id or self._make_run()
        self._ledger.change(run_id=self._run_id)
        if record.run_id and not record.status:
            self._store.reopen(self._run_id)
        self._sent = line_start(self._metrics, self._ledger.record.metrics_sent)

    def _make_run(self) -> str:
        record = self._ledger.record
        experiment = self._store.experiment_id(record.experiment)
        if found := self._store.find_run(experiment, tag=KEY_TAG, value=record.key):
            return found
        if before := record.tags.get(GOES_ON_TAG):
            self._store.end_if_running(before)
        tags = {**record.tags, KEY_TAG: record.key}
        self._known = {}
        run_id = self._store.create_run(
            experiment, name=record.run_name, tags=tags, began_ms=record.began_ms
        )
        if not run_id:  # as of a server that answers `{}` to everything
            raise StorageError("it made no run; is there an MLflow server at this address?")
        return run_id

    def _send_labels(self) -> None:
        record = self._ledger.record
        if params := _news(record.params, self._params):
            self._store.log_params(self._run_id, params)
            self._params |= params
        if tags := _news(record.tags, self._tags):
            self._store.set_tags(self._run_id, tags)
            self._tags |= tags
        for note in record.datasets:
            if note not in self._datasets:
                self._store.log_dataset(self._run_id, note)
                self._datasets.add(note)

    def _send_metrics(self) -> None:
        while entries := read_entries(self._metrics, self._sent, max_points=METRICS_PER_BATCH):
            points = [point for entry in entries for point in entry.points]
            self._learn_what_is_known(points)
            missing = [point for point in points if not self._is_known(point)]
            self._store.log_metrics(self._run_id, missing)
            self._sent = entries[-1].end
            self.points += len(missing)

    def _learn_what_is_known(self, points: list[MetricPoint]) -> None:
        if self._known is None and points:
            least = min(point.step for point in points)
            self._known = self._store.points_known(self._run_id, least=least)
            self._ceiling = max(
                (step for known in self._known.values() for step, _ in known), default=-1
            )
        if points and points[0].step > self._ceiling:
            self._known = {}  # all from here on is new

    def _is_known(self, point: MetricPoint) -> bool:
        assert self._known is not None, "asked for before"
        return (point.step, point.time_ms) in self._known.get(point.key, ())

    def _send_status(self, record: MlflowRecord) -> None:
        if record.status and record.status != self._status:
            self._store.finish(self._run_id, record.status, ended_ms=record.ended_ms)
            self._status = record.status

    def _send_artifacts(self) -> None:
        for name, path in list(self._owed()):
            changes = self._ledger.changes[name]
            self._store.log_artifact(self._run_id, path, under=_folder_of(name))
            self._ledger.artifact_sent(name, changes)

    def _owed(self) -> Iterator[tuple[str, Path]]:
        """Files the store does not have, without those that no longer exist."""
        root = self._metrics.parent
        for name, is_there in self._ledger.record.artifacts.items():
            if is_there or name in self._refused or not os.path.lexists(root / name):
                continue
            if is_own(root, name):
                yield name, root / name
            else:
                self._refused.add(name)
                logger.warning(
                    "%s is not sent to MLflow: it is, or leads, outside of the run %s.", name, root
                )

    def _send_models(self) -> None:
        for link in self._ledger.record.models:
            if not link.model_id:
                known = dataclasses.replace(
                    link, model_id=self._store.link_model(self._run_id, link)
                )
                others = self._ledger.record.models
                self._ledger.change(
                    models=tuple(known if other == link else other for other in others)
                )

    def _mark(self) -> None:
        """Notes how far the journal is known to have arrived; an older note only costs a query."""
        is_due = time.monotonic() - self._marked_at >= SECONDS_PER_MARK
        if self._run_id and (is_due or self._ledger.record.status):
            self._marked_at = time.monotonic()
            self._ledger.change(metrics_sent=self._sent)


def is_own(root: Path, name: str) -> bool:
    """Whether a name is that of a file or folder in the run, with no link on the way or in it."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        return False
    path = root
    for part in parts:
        path /= part
        if path.is_symlink():
            return False
    walked = (Path(top, one) for top, dirs, files in os.walk(path) for one in [*dirs, *files])
    return all(_is_plain(one) for one in (path, *walked))


def _is_plain(path: Path) -> bool:
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _folder_of(name: str) -> str:
    """The folder of a file in the store: as in the run, and copies at the top."""
    folder = str(Path(name).parent)
    return "" if folder == "." or name.startswith(PRIVATE) else folder


def _news(wanted: dict[str, str], known: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if known.get(name) != value}


SECONDS_PER_TICK = 1.0
RETRY_SECONDS = 60.0
QUICK_SECONDS = 1.0
# Importing MLflow takes seconds of the interpreter, which the first step of a training goes before.
FIRST_STEP_SECONDS = 10.0


class Sender:
    """Sends what is new every second; after a failure it leaves the store alone for a minute.

    It begins when it is asked to, or after `FIRST_STEP_SECONDS`.
    """

    def __init__(self, uri: str, ledger: Ledger, metrics: Path, home: Path) -> None:
        self._uri = uri
        self._ledger = ledger
        self._metrics = metrics
        self._home = home
        self._delivery: Delivery | None = None
        self._may_begin = threading.Event()
        self._was_asked = threading.Event()
        self._over = threading.Event()
        self._is_loaded = threading.Event()
        self._retry_at = 0.0
        self._last_took = 0.0
        self._has_warned = False
        self._quiet = ExitStack()
        self._quiet.enter_context(mlflow_silenced())
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        """Whether the store knows all of the run, and how it ended."""
        is_at_work = self._thread.is_alive()
        return not is_at_work and self._delivery is not None and self._delivery.is_complete

    def begin(self) -> None:
        """Sends from now on."""
        self._may_begin.set()

    def wait_for_answer(self, patience: float) -> None:
        """Waits until the store made the run or failed, no longer than so many seconds."""
        self.begin()
        self._was_asked.wait(patience)

    def finish(self, patience: float) -> None:
        """Waits so many seconds for the rest to be sent; what is not stays in the ledger."""
        self._over.set()
        self.begin()
        self._is_loaded.wait()  # an import waits for no store, and needs the quiet to its end
        self._thread.join(patience)
        self._quiet.close()
        if not self.is_complete:
            self._warn("did not take all in time")

    def _work(self) -> None:
        self._may_begin.wait(FIRST_STEP_SECONDS)
        try:
            self._send()
        except Exception as error:
            # Python would say it by itself, and the secrets in it.
            self._warn(f"failed: {reason_of(error)}")
            logger.error("%s", redacted(traceback.format_exc()))
        finally:
            self._was_asked.set()

    def _send(self) -> None:
        while True:
            is_over = self._over.is_set()
            is_due = time.monotonic() >= self._retry_at
            # At the end a store that refuses at once is asked again; one that hangs is not.
            if is_due or (is_over and self._last_took < QUICK_SECONDS):
                self._attempt()
            if is_over:
                return
            self._over.wait(SECONDS_PER_TICK)

    def _attempt(self) -> None:
        started = time.monotonic()
        try:
            if self._delivery is None:
                self._load()
                store = MlflowStore(self._uri)
                self._delivery = Delivery(store, self._ledger, self._metrics)
            self._delivery.deliver()
        except failures() as error:
            self._rest(error)
        finally:
            self._last_took = time.monotonic() - started
            self._was_asked.set()

    def _load(self) -> None:
        try:
            load(self._uri)
        finally:
            self._is_loaded.set()

    def _rest(self, error: BaseException) -> None:
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._warn(f"failed: {reason_of(error)}")

    def _warn(self, what: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "MLflow at %s %s. The work continues; %s keeps all metrics, and what is missing "
            "is sent later, or by `align mlflow-sync %s`.",
            address_of(self._uri),
            what,
            self._metrics,
            self._home,
        )
