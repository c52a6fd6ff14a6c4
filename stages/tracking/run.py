"""Records a run on disk, and sends it to trackers from background threads.

All data is written to disk first (`metrics_log.py`, `run_record.py`), so a tracker that is down
causes a warning and never stops a run; `align mlflow-sync` sends the rest later.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from ... import __version__
from ...schemas.cache import InputEntry
from ...schemas.config import TrackingOptions
from ...schemas.errors import Interrupted, StorageError, log_failure
from ...schemas.safe_text import mask_secrets_of, masked_address, redacted, shown
from ..storage.disk import fs
from ..storage.disk.locks import owner_lock, try_owner_lock
from ..storage.run.run_folder import RunFolder
from .metrics_log import Callback, MetricsLog, kept_lines, read_metrics
from .run_record import (
    COPIES,
    KEY_TAG,
    NUMBERS_TAG,
    PARENT_TAG,
    Dataset,
    RunFacts,
    RunRecord,
    Sent,
    Status,
    Store,
    new_outbox_folder,
    now_ms,
    outbox_folders,
    remove_empty_outbox,
    remove_sent,
)
from .tracker import TRACKERS, Tracker, addresses, quiet, tracker_of

logger = logging.getLogger("align")

# Timeout for trackers at the end of a run; after a signal the process may be killed soon.
WAIT_SECONDS = {"FINISHED": 30.0, "FAILED": 15.0, "KILLED": 5.0}
UPLOAD_SECONDS = 6 * 3600.0  # timeout of a run that uploads its model
# Delay before libraries are imported, because an import would slow down the first training step.
FIRST_STEP_SECONDS = 10.0
SECONDS_PER_TICK = 1.0
RETRY_SECONDS = 60.0
QUICK_SECONDS = 1.0
LINES_PER_CALL = 100

_NO_TAGS: Mapping[str, str] = MappingProxyType({})
_TAGS: ContextVar[Mapping[str, str]] = ContextVar("tags", default=_NO_TAGS)


@contextmanager
def tagged(tags: Mapping[str, str], parent: Run | None = None) -> Iterator[None]:
    """Adds these tags, and the key of `parent`, to every run that starts in the block."""
    above = {PARENT_TAG: parent.record.facts.key} if parent and parent.record.facts.key else {}
    token = _TAGS.set({**_TAGS.get(), **tags, **above})
    try:
        yield
    finally:
        _TAGS.reset(token)


def inherited(tag: str) -> str:
    """The value of a tag that `tagged` sets here; empty if it sets none."""
    return _TAGS.get().get(tag, "")


def open_training_run(
    options: TrackingOptions,
    folder: RunFolder,
    *,
    name: str,
    tags: Mapping[str, str],
    keep_through: int,
    is_evaluated: bool = True,
) -> Run:
    """Starts the record of a training, or resumes it after step `keep_through`; -1: from the start.

    A resumed training stays one run, unless steps are repeated with other settings. An existing
    record is also updated while no tracker is in use, for a later `mlflow-sync`.
    """
    trackers, record = addresses(options, folder.root), RunRecord.find(folder)
    kept, dropped = kept_lines(folder.metrics, keep_through=keep_through, is_evaluated=is_evaluated)
    # The record is updated before metrics.jsonl is cut: after a kill in between, the cut lines
    # would be lost and the change of settings would not be noticed.
    if record:
        before, numbers = record.facts.tags.get(NUMBERS_TAG), tags.get(NUMBERS_TAG, "")
        if before and before != numbers and (dropped or not kept):
            record.replace_run(numbers, keeps_facts=bool(kept))
        record.resume(kept)
    metrics = MetricsLog(folder.metrics, kept)
    if not (trackers or record):
        return Run(folder, metrics)
    record = record or RunRecord.new(folder, redacted(options.run_name or name))
    run = Run(folder, metrics, record)
    if options.upload_model:
        run.wait_seconds = {**WAIT_SECONDS, "FINISHED": UPLOAD_SECONDS}
    run.set_tags({**_version_tags(), **_TAGS.get(), **tags})
    run.send_to(trackers, options)  # last, because it starts threads that only `finish` ends
    return run


@contextmanager
def recorded(
    options: TrackingOptions, home: Path, stage: str, *, name: str = "", is_alone: bool = True
) -> Iterator[Run]:
    """Records a run that is not a training, in the outbox of its output folder.

    If the process is alone there, it also sends pending earlier runs; those whose process was
    killed get the status KILLED.
    """
    trackers = addresses(options, home)
    if not trackers:
        yield Run(RunFolder(home))
        return
    own: list[RunFolder] = []
    earlier: list[RunRecord] = []
    with ExitStack() as stack:
        # Registered first, so that it runs after the locks in these folders are released.
        if is_alone:
            stack.callback(remove_empty_outbox, home)
        stack.callback(lambda: [*map(remove_sent, own)])
        for left in outbox_folders(home) if is_alone else ():
            with log_failure("An earlier run is not sent"):
                fs.make_folder(left.private)
                if stack.enter_context(try_owner_lock(left.root, stage)):
                    if record := RunRecord.find(left):
                        if not record.facts.status:
                            record.change(status="KILLED", ended_ms=now_ms())
                        earlier.append(record)
                    own.append(left)
        folder = new_outbox_folder(home)
        own.append(folder)
        stack.enter_context(owner_lock(folder.root, stage))
        record = RunRecord.new(folder, redacted(options.run_name or name or stage))
        run = Run(folder, MetricsLog(folder.metrics), record)
        run.set_tags({**_version_tags(), **_TAGS.get(), "align.stage": stage})
        run.send_to(trackers, options, home=home, earlier=earlier)
        run.begin_sending()
        status: Status = "FAILED"
        try:
            yield run
            status = "FINISHED"
        except (Interrupted, KeyboardInterrupt):
            status = "KILLED"
            raise
        finally:
            with log_failure("The status of the run is not recorded"):
                run.finish(status)


def _version_tags() -> dict[str, str]:
    """The versions that may affect a run's metrics."""
    packages = ("torch", "transformers", "deepspeed")
    versions = {f"{name}.version": version(name) for name in packages}
    return {"align.version": __version__, **versions}


class Run:
    """Writes metrics to metrics.jsonl and the rest to the record; uploaders send both.

    Without a metrics log or a record, it does not write that part.
    """

    def __init__(
        self, folder: RunFolder, metrics: MetricsLog | None = None, record: RunRecord | None = None
    ) -> None:
        self.callbacks: tuple[Callback, ...] = ()
        self.record = record or RunRecord(folder, RunFacts(), is_kept=False)
        self.uploaders: list[Uploader] = []
        self.wait_seconds = WAIT_SECONDS
        self._root = folder.root.absolute()
        self._metrics = metrics
        self._quiet = ExitStack()
        self._has_ended = False

    def send_to(
        self,
        trackers: Mapping[str, str],
        options: TrackingOptions,
        *,
        home: Path | None = None,
        earlier: Sequence[RunRecord] = (),
    ) -> None:
        """Starts an uploader per tracker and address; it sends once `begin_sending` is called.

        An uploader also sends those earlier runs of `home` that belong to the same store.
        """
        stores = {}
        for name, address in trackers.items():
            tracker, experiment = tracker_of(name), options.experiment
            if experiment == TrackingOptions().experiment:
                experiment = os.environ.get(tracker.experiment_variable) or experiment
            if known := self.record.facts.stores.get(name):  # resuming never changes it
                experiment = known.experiment
            stores[name] = Store(tracker.plain_address(address), redacted(experiment))
        self.record.add_stores(stores)
        for name, address in trackers.items():
            self._quiet.enter_context(quiet(name))
            senders = [Sender(name, address, self.record)]
            for record in earlier:
                store = record.facts.stores.get(name)
                if store and store.address == stores[name].address:
                    senders.append(Sender(name, address, record))
            self.uploaders.append(Uploader(senders, f"align mlflow-sync {home or self._root}"))

    @property
    def run_ids(self) -> dict[str, str]:
        """The id of this run in each store that has answered."""
        found = {name: self.record.sent(name).run_id for name in self.record.facts.stores}
        return {name: run_id for name, run_id in found.items() if run_id}

    def origins(self) -> dict[str, str]:
        """The trackers' ids of this run, and the tag that finds the run in each store."""
        found = {}
        for name in self.record.facts.stores:
            if name in TRACKERS:  # another installation may have more trackers
                title = tracker_of(name).title
                found[f"{title} run"] = self.run_ids.get(name, "not named yet")
                found[f"{title} tag {KEY_TAG}"] = self.record.facts.key
        return found

    def log_params(self, params: Mapping[str, object]) -> None:
        """Records settings; stores keep a setting's first value, so a later one becomes a tag."""
        facts = self.record.facts
        values = {name: redacted(str(value)) for name, value in params.items()}
        changed = {f"changed.{k}": v for k, v in values.items() if facts.params.get(k, v) != v}
        self.record.change(params={**values, **facts.params}, tags={**facts.tags, **changed})

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Writes a line of metrics.jsonl and passes it to the callbacks."""
        if self._metrics:
            line = self._metrics.append(metrics, step=step)
            for callback in self.callbacks:
                callback(step, line)

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """Records an input data set with its digest."""
        data = Dataset(redacted(name), digest, redacted(source), context)
        self.record.change(datasets=(*dict.fromkeys((*self.record.facts.datasets, data)),))

    def log_files(self, files: Iterable[InputEntry]) -> None:
        """Records the data files of a cache."""
        for one in files:
            self.log_dataset(one.name, digest=one.sha256, source=one.name, context="reference")

    def log_artifact(self, path: Path) -> None:
        """Records a file or folder for upload; call it again after a change.

        A file outside the run's folder is copied into it.
        """
        if not self.record.facts.stores:
            return
        whole = path.absolute()
        if not whole.is_relative_to(self._root):
            whole = self._root / COPIES / path.name
            fs.make_folder(whole.parent)
            fs.publish(whole, fs.read_bytes(path))
        self.record.log_file(whole)

    def log_model_link(self, folder: Path, *, tags: Mapping[str, str]) -> None:
        """Records the path of the trained model; the model itself is not uploaded."""
        model = {redacted(str(folder.absolute())): dict(tags)}
        self.record.change(models={**self.record.facts.models, **model})

    def describe(self, text: str) -> None:
        """Records a description of the run; only the first call counts."""
        self.record.change(description=self.record.facts.description or redacted(text))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags, by which stores can be searched."""
        values = {name: redacted(value) for name, value in tags.items()}
        self.record.change(tags={**self.record.facts.tags, **values})

    def begin_sending(self) -> None:
        """Allows the uploaders to import libraries and to send."""
        for uploader in self.uploaders:
            uploader.begin()

    def sync(self) -> None:
        """Makes all metrics lines durable; call it before saving a checkpoint."""
        if self._metrics:
            self._metrics.sync()

    def finish(self, status: Status) -> None:
        """Records the final status and waits for the uploaders; only the first call counts."""
        if self._has_ended:
            return
        self._has_ended = True
        try:
            metrics, self._metrics = self._metrics, None
            if metrics:
                with closing(metrics):
                    metrics.sync()
            self.record.change(status=status, ended_ms=now_ms())
        finally:  # also if the disk is full
            for uploader in self.uploaders:
                uploader.end()
            with self._quiet:
                deadline = time.monotonic() + self.wait_seconds[status]
                for uploader in self.uploaders:
                    uploader.join(max(0.0, deadline - time.monotonic()))


class Uploader:
    """A thread that sends runs to one tracker every second, and waits a minute after a failure.

    It starts at `begin`, or after `FIRST_STEP_SECONDS`. The command's own run is sent first, and
    its first failure is a warning; an earlier run that fails waits for the next command.
    """

    def __init__(self, senders: Sequence[Sender], command: str) -> None:
        self._senders, self._command = senders, command
        self._sender, self._earlier = senders[0], [*senders[1:]]
        self._has_warned = False
        self._may_begin, self._is_over = threading.Event(), threading.Event()
        self._is_loaded = threading.Event()
        self.thread = threading.Thread(target=self._work, name=self._sender.name, daemon=True)
        self.thread.start()

    def begin(self) -> None:
        """Starts sending."""
        self._may_begin.set()

    def end(self) -> None:
        """Requests the final upload; returns once the library is imported, without network."""
        self._is_over.set()
        self._may_begin.set()
        self._is_loaded.wait()

    def join(self, seconds: float) -> None:
        """Waits up to `seconds` for the final upload; unsent data stays in the record."""
        self.thread.join(seconds)
        if not self._sender.is_complete:
            self._warn("did not receive everything in time")
        if self.thread.is_alive():  # the locks of the runs may be released from now on
            self._earlier.clear()
            for sender in self._senders:
                sender.record.release()

    def _work(self) -> None:
        self._may_begin.wait(FIRST_STEP_SECONDS)
        took = retry_at = 0.0
        while True:
            is_over = self._is_over.is_set()
            # At the end, a store that failed quickly is tried again; one that hung is not.
            if time.monotonic() >= retry_at or (is_over and took < QUICK_SECONDS):
                started = time.monotonic()
                try:
                    try:
                        self._sender.load()
                    finally:
                        self._is_loaded.set()
                    started = time.monotonic()  # without the import, which takes seconds
                    self._sender.send()
                    # Once the run ends, the rest of it is sent before more earlier runs.
                    while self._earlier and self._is_over.is_set() == is_over:
                        self._send_earlier(self._earlier.pop(0))
                except Exception as error:  # a tracker's library may raise any type
                    took = time.monotonic() - started
                    retry_at = time.monotonic() + RETRY_SECONDS
                    self._warn(f"failed: {reason_of(error)}")
                    logger.debug("%s", redacted(traceback.format_exc()))
            if is_over:
                return
            self._is_over.wait(SECONDS_PER_TICK)

    def _send_earlier(self, sender: Sender) -> None:
        try:
            sender.send()
        except Exception:  # as above; its own command has logged a warning
            logger.debug("%s", redacted(traceback.format_exc()))

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            logger.warning(
                "%s %s. The run continues; after its end, `%s` sends the missing data.",
                self._sender.place,
                what,
                self._command,
            )
        self._has_warned = True


class Sender:
    """Sends the missing data of one run to one tracker; repeating it changes nothing."""

    def __init__(self, name: str, address: str, record: RunRecord) -> None:
        self.name, self.record = name, record
        self.numbers = 0  # numbers sent by this object
        self.is_complete = False  # whether the run has ended and the tracker has all of it
        self._address = address
        self._tracker: Tracker | None = None
        self._is_open = False  # whether `begin` and all later calls have succeeded
        self._labels: object = None

    @property
    def place(self) -> str:
        """The store's name for messages; registers the secrets of its address for masking."""
        mask_secrets_of(self._address)
        address = masked_address(self._address) if "://" in self._address else self._address
        return f"{tracker_of(self.name).title} at {address}"

    def load(self) -> Tracker:
        """Imports the library, without contacting the store."""
        self._tracker = self._tracker or tracker_of(self.name)(self._address)
        return self._tracker

    def send(self) -> None:
        """Sends the missing data; after an error, the next call resumes where this one stopped."""
        if self.is_complete:
            return
        tracker, record = self.load(), self.record
        facts = record.facts  # if it has a status, no line or file is added later
        sent = record.sent(self.name)
        is_open, self._is_open = self._is_open, False
        if not is_open:
            if sent.run_id and not tracker.has(facts, sent.run_id):
                sent = Sent()  # the store lost the run, so all of it is sent again
            elif record.is_sent(self.name):
                self.is_complete = True
                return
            sent = self._keep(tracker.begin(facts, sent, record.folder.metrics))
            self._labels = None

        unsent = read_metrics(record.folder.metrics, sent.offset)
        while lines := [*islice(unsent, LINES_PER_CALL)]:
            tracker.log(lines)
            self.numbers += sum(len(line.metrics) for line in lines)
            sent = self._keep(replace(sent, offset=lines[-1].end))

        labels = replace(facts, files={})
        if labels != self._labels:
            tracker.label(facts)
            self._labels = labels

        for name, logged in record.unsent_files(sent):
            folder = Path() if name.startswith(COPIES) else Path(name).parent
            tracker.file(record.folder.root / name, "" if folder == Path() else str(folder))
            sent = self._keep(replace(sent, files={**sent.files, name: logged}))

        if facts.status:
            tracker.close(facts)
            self._keep(replace(sent, status=facts.status))
            self.is_complete = True
        self._is_open = True

    def _keep(self, sent: Sent) -> Sent:
        self.record.keep_sent(self.name, sent)
        return sent


def reason_of(error: BaseException) -> str:
    """The first line of a store's error, without secrets."""
    text = redacted(str(error).strip()) or type(error).__name__
    if isinstance(error, StorageError):  # our own messages are kept whole
        return text.rstrip(".")
    return shown(text.partition("\n")[0])[:200].rstrip(".")
