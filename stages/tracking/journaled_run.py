"""The record of a run: a journal of its numbers, and a ledger of the rest, sent on to MLflow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from ... import __version__
from ...schemas.config import TrackingOptions
from ...schemas.errors import Interrupted, log_failure
from ...schemas.safe_text import redacted
from ..storage import fs
from ..storage.locks import owner_lock
from ..storage.objects import Location
from ..storage.run_folder import RunFolder
from ..storage.store import store_of
from .delivery import PRIVATE, Sender
from .journal import (
    MAX_PARAM,
    MAX_TAG,
    Callback,
    DatasetNote,
    Journal,
    ModelLink,
    Status,
    key_of,
    open_journal,
    shortened,
)
from .mlflow_client import GOES_ON_TAG
from .outbox import Ledger, close_record, new_record, now_ms, open_ledger, remove_if_sent

# Who stops a process by a signal kills it half a minute later.
PATIENCE_SECONDS = {"FINISHED": 30.0, "FAILED": 15.0, "KILLED": 5.0}
UPLOAD_SECONDS = 6 * 3600.0
DEFAULT_URI = "sqlite:///mlflow.db"
_INHERITED: ContextVar[Mapping[str, str]] = ContextVar("tags", default=MappingProxyType({}))


@contextmanager
def tagged(tags: Mapping[str, str]) -> Iterator[None]:
    """Gives these tags to every run that begins inside, such as that of its parent."""
    token = _INHERITED.set({**_INHERITED.get(), **tags})
    try:
        yield
    finally:
        _INHERITED.reset(token)


def open_training_run(
    options: TrackingOptions,
    folder: RunFolder,
    *,
    name: str,
    tags: Mapping[str, str],
    keep_through: int,
    is_evaluated: bool = True,
) -> Run:
    """Begins the record of a run, or continues it after a step; -1 keeps no earlier line.

    Without MLflow, a run that has a ledger keeps it up to date, for `mlflow-sync`.
    """
    journal = open_journal(folder.metrics, keep_through=keep_through, is_evaluated=is_evaluated)
    if not options.mlflow and not folder.mlflow.exists():
        return Run(folder.root, journal)
    ledger = _open_ledger(options, folder, name)
    # MLflow takes no number back. One run would show two futures, so the true one gets its own.
    if journal.dropped or ledger.record.metrics_sent > folder.metrics.stat().st_size:
        ledger.begin_again()
    uri, metrics = store_uri(options), folder.metrics
    sender = Sender(uri, ledger, metrics, folder.root) if options.mlflow else None
    run = Run(folder.root, journal, ledger, sender, uploads=options.upload_model)
    run.set_tags({**version_tags(), **_INHERITED.get(), **tags})
    return run


@contextmanager
def recorded(
    options: TrackingOptions,
    home: Path,
    stage: str,
    *,
    is_recorded: bool,
    is_alone: bool = True,
    goes_on_from: str = "",
) -> Iterator[Run]:
    """Records the work on a cache or sweep in MLflow, under the name of its stage.

    The record is in the outbox of that folder until MLflow was sent all of it. Unless a process is
    alone there, it leaves the rest of the outbox as it is.
    """
    if not (is_recorded and options.mlflow):
        yield Run(home)
        return
    folder = new_record(home, is_alone=is_alone)
    with ExitStack() as stack:
        # After the lock, which is in the folder.
        stack.callback(remove_if_sent, folder, is_alone=is_alone)
        stack.enter_context(owner_lock(folder, stage))
        status: Status = "FAILED"
        journal = open_journal(folder.metrics, keep_through=-1)
        ledger = _open_ledger(options, folder, stage)
        origin = {GOES_ON_TAG: goes_on_from} if goes_on_from else {}
        ledger.add("tags", {**version_tags(), **_INHERITED.get(), **origin, "align.stage": stage})
        sender = Sender(store_uri(options), ledger, folder.metrics, home)
        run = Run(folder.root, journal, ledger, sender)
        try:
            # MLflow is imported by then, and what belongs to this run can name it.
            sender.wait_for_answer(PATIENCE_SECONDS["FINISHED"])
            yield run
            status = "FINISHED"
        except (Interrupted, KeyboardInterrupt):
            status = "KILLED"
            raise
        finally:
            with log_failure("No record of how the run ended"):
                run.finish(status)
                if sender.is_complete:
                    close_record(folder)


def _open_ledger(options: TrackingOptions, folder: RunFolder, name: str) -> Ledger:
    return open_ledger(
        folder.mlflow,
        uri=store_uri(options) if options.mlflow else "",
        experiment=experiment_name(options),
        run_name=redacted(options.run_name or name),
    )


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


class Run:
    """Writes numbers to the journal and all else to the ledger; another thread sends both.

    Without a journal it keeps no numbers, without a ledger nothing is for MLflow.
    """

    def __init__(
        self,
        root: Path,
        journal: Journal | None = None,
        ledger: Ledger | None = None,
        sender: Sender | None = None,
        *,
        uploads: bool = False,
    ) -> None:
        self.callbacks: tuple[Callback, ...] = ()
        self._root = root.absolute()
        self._journal = journal
        self._ledger = ledger
        self._sender = sender
        self._patience = PATIENCE_SECONDS | ({"FINISHED": UPLOAD_SECONDS} if uploads else {})

    @property
    def run_id(self) -> str:
        """The store's name for this run, empty as long as the store has not answered."""
        return self._ledger.record.run_id if self._ledger else ""

    @property
    def run_key(self) -> str:
        """The tag `align.run_key` by which the store knows it, sooner or later."""
        return self._ledger.record.key if self._ledger else ""

    def log_params(self, params: Mapping[str, str]) -> None:
        """Settings, flat; a store keeps the first value, so a later one becomes a tag."""
        if self._ledger:
            known = self._ledger.record.params
            values = {key_of(k): shortened(str(v), MAX_PARAM) for k, v in params.items()}
            self._ledger.add("params", {k: v for k, v in values.items() if k not in known})
            self.set_tags({f"changed.{k}": v for k, v in values.items() if known.get(k, v) != v})

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Numbers at one step, in one line."""
        if self._journal:
            line = self._journal.append(metrics, step=step)
            for callback in self.callbacks:
                callback(step, line)

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """The data that went in, under our own digest."""
        if self._ledger:
            note = DatasetNote(redacted(name), digest, redacted(source), context)
            self._ledger.append("datasets", note)

    def log_artifact(self, path: Location) -> None:
        """A file or folder to keep with the run; a second time, when it has changed.

        Of a file elsewhere a copy is kept: only files inside the run are sent.
        """
        if not self._ledger:
            return
        whole = self._root / PRIVATE / "artifacts" / path.name
        store = store_of(path)
        if store.is_within(path, self._root):
            whole = store.local(path).absolute()
        else:
            fs.make_folder(whole.parent)
            fs.publish(whole, store.read(path), label="config")
        self._ledger.renew_artifact(str(whole.relative_to(self._root)))

    def log_model_link(self, folder: Path, *, tags: Mapping[str, str]) -> None:
        """The path of the model that this run made; the model itself stays there."""
        if not self._ledger:
            return
        where = redacted(str(folder.absolute()))
        if where not in {link.folder for link in self._ledger.record.models}:
            labels = {name: shortened(value, MAX_TAG) for name, value in tags.items()}
            self._ledger.append("models", ModelLink(where, labels, ""))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Labels to search by."""
        if self._ledger:
            labels = {key_of(name): shortened(value, MAX_TAG) for name, value in tags.items()}
            self._ledger.add("tags", labels)

    def begin_sending(self) -> None:
        """Lets MLflow be imported and sent what there is, beside the work."""
        if self._sender:
            self._sender.begin()

    def sync(self) -> None:
        """Makes every line durable; call it before a checkpoint is saved."""
        if self._journal:
            self._journal.sync()

    def finish(self, status: Status) -> None:
        """The truth about how it ended; the first word counts."""
        if self._journal:
            self._journal.sync()
            self._journal.close()
        if self._ledger and not self._ledger.record.status:
            self._ledger.change(status=status, ended_ms=now_ms())
            if self._sender:
                self._sender.finish(self._patience[status])
