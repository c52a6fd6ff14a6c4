"""The record of a training run: a journal beside the checkpoints, sent on to MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from ...schemas.config import TrackingOptions
from ...schemas.safe_text import redacted
from ..storage import fs
from ..storage.run_folder import RunFolder
from .delivery import PRIVATE, Sender
from .journal import (
    MAX_TAG,
    Callback,
    DatasetNote,
    Journal,
    ModelLink,
    NullRun,
    Status,
    key_of,
    open_journal,
    shortened,
)
from .mlflow_run import experiment_name, sorted_out, store_uri, version_tags
from .outbox import Ledger, open_ledger

# Who stops a process by a signal kills it half a minute later.
PATIENCE_SECONDS = {"FINISHED": 30.0, "FAILED": 15.0, "KILLED": 5.0}
UPLOAD_SECONDS = 6 * 3600.0


def open_training_run(
    options: TrackingOptions,
    folder: RunFolder,
    *,
    name: str,
    tags: Mapping[str, str],
    keep_through: int,
    is_evaluated: bool = True,
) -> JournaledRun:
    """Begins the record of a run, or goes on with it after a step; -1 keeps no earlier line.

    Without MLflow, a run that has a ledger keeps it up to date, for `mlflow-sync`.
    """
    journal = open_journal(folder.metrics, keep_through=keep_through, is_evaluated=is_evaluated)
    if not options.mlflow and not folder.mlflow.exists():
        return JournaledRun(journal, NullRun())
    ledger = open_ledger(
        folder.mlflow,
        uri=store_uri(options) if options.mlflow else "",
        experiment=experiment_name(options),
        run_name=redacted(options.run_name or name),
    )
    # MLflow takes no number back. One run would show two futures, so the true one gets its own.
    if journal.dropped or ledger.record.metrics_sent > folder.metrics.stat().st_size:
        ledger.begin_again()
    sender = Sender(store_uri(options), ledger, folder.metrics) if options.mlflow else None
    patience = UPLOAD_SECONDS if options.upload_model else PATIENCE_SECONDS["FINISHED"]
    run = LedgerRun(ledger, sender, folder.root, patience=patience)
    run.set_tags({**version_tags(), **tags})
    return JournaledRun(journal, run)


class JournaledRun:
    """Writes the metrics down; all else is for the tracker behind it, which reads them there."""

    def __init__(self, journal: Journal, tracker: LedgerRun | NullRun) -> None:
        self.callbacks: tuple[Callback, ...] = ()
        self._journal = journal
        self._tracker = tracker

    @property
    def run_id(self) -> str:
        """The store's name for this run, empty as long as it has none."""
        return self._tracker.run_id

    @property
    def run_key(self) -> str:
        """The tag `align.run_key` by which the store knows it, sooner or later."""
        return self._tracker.run_key

    def log_params(self, params: Mapping[str, str]) -> None:
        """Settings, flat."""
        self._tracker.log_params(params)

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Numbers at one step, in one line."""
        line = self._journal.append(metrics, step=step)
        self._tracker.log_metrics(metrics, step=step)
        for callback in self.callbacks:
            callback(step, line)

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """The data that went in, under our own digest."""
        self._tracker.log_dataset(name, digest=digest, source=source, context=context)

    def log_artifact(self, path: Path) -> None:
        """A file to keep with the run."""
        self._tracker.log_artifact(path)

    def log_model_link(self, folder: Path, *, tags: Mapping[str, str]) -> None:
        """Where the model lies that this run made."""
        self._tracker.log_model_link(folder, tags=tags)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Labels to search by."""
        self._tracker.set_tags(tags)

    def sync(self) -> None:
        """Makes every line durable; call it before a checkpoint is saved."""
        self._journal.sync()

    def finish(self, status: Status) -> None:
        """The truth about how it ended."""
        self._journal.sync()
        self._journal.close()
        self._tracker.finish(status)


class LedgerRun:
    """Notes what to send to MLflow; another thread sends it."""

    def __init__(
        self, ledger: Ledger, sender: Sender | None, root: Path, *, patience: float
    ) -> None:
        self._patience = {**PATIENCE_SECONDS, "FINISHED": patience}
        self._ledger = ledger
        self._sender = sender
        self._root = root.absolute()

    @property
    def run_id(self) -> str:
        """The store's name for this run, empty as long as it has not answered."""
        return self._ledger.record.run_id

    @property
    def run_key(self) -> str:
        """The tag by which it is found where its name was never heard."""
        return self._ledger.record.key

    def log_params(self, params: Mapping[str, str]) -> None:
        """Settings, flat; a store keeps the first value, so a later one becomes a tag."""
        fresh, changed = sorted_out(params, self._ledger.record.params)
        self._ledger.add("params", fresh)
        self.set_tags(changed)

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Nothing: they are read from the journal."""

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """The data that went in, under our own digest."""
        note = DatasetNote(redacted(name), digest, redacted(source), context)
        self._ledger.append("datasets", note)

    def log_artifact(self, path: Path) -> None:
        """A file or folder to keep with the run; a second time, when it has changed.

        Of a file elsewhere a copy is kept: what is sent lies in the run and nowhere else.
        """
        whole = path.absolute()
        if not whole.is_relative_to(self._root):
            whole = self._root / PRIVATE / "artifacts" / path.name
            fs.make_folder(whole.parent)
            fs.publish(whole, fs.read_bytes(path), label="config")
        self._ledger.add("artifacts", {str(whole.relative_to(self._root)): False})

    def log_model_link(self, folder: Path, *, tags: Mapping[str, str]) -> None:
        """Where the model lies that this run made."""
        links = self._ledger.record.models
        where = redacted(str(folder.absolute()))
        if where not in {link.folder for link in links}:
            labels = {name: shortened(value, MAX_TAG) for name, value in tags.items()}
            self._ledger.append("models", ModelLink(where, labels, ""))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Labels to search by."""
        labels = {key_of(name): shortened(value, MAX_TAG) for name, value in tags.items()}
        self._ledger.add("tags", labels)

    def sync(self) -> None:
        """Nothing: the ledger is durable after every change."""

    def finish(self, status: Status) -> None:
        """The truth about how it ended; the first word counts."""
        if not self._ledger.record.status:
            self._ledger.change(status=status, ended_ms=time.time_ns() // 1_000_000)
            if self._sender:
                self._sender.finish(self._patience[status])
