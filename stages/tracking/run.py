"""A run as its command records it, and the threads that send it to trackers beside the work.

All that is recorded is on disk first (`metrics_log.py`, `run_record.py`), so a tracker that is
down causes a warning and never stops a run; `align mlflow-sync` sends the rest with a `Sender`.
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

# How long the end of a run waits for trackers: after a signal the process may be killed soon.
WAIT_SECONDS = {"FINISHED": 30.0, "FAILED": 15.0, "KILLED": 5.0}
UPLOAD_SECONDS = 6 * 3600.0  # of a run that uploads its model
# An import takes seconds of the interpreter, which the first step of a training needs.
FIRST_STEP_SECONDS = 10.0
SECONDS_PER_TICK = 1.0
RETRY_SECONDS = 60.0
QUICK_SECONDS = 1.0
LINES_PER_CALL = 100

_NO_TAGS: Mapping[str, str] = MappingProxyType({})
_TAGS: ContextVar[Mapping[str, str]] = ContextVar("tags", default=_NO_TAGS)


@contextmanager
def tagged(tags: Mapping[str, str], parent: Run | None = None) -> Iterator[None]:
    """Gives these tags to every run that begins inside, and the key of the run it belongs to."""
    above = {PARENT_TAG: parent.record.facts.key} if parent and parent.record.facts.key else {}
    token = _TAGS.set({**_TAGS.get(), **tags, **above})
    try:
        yield
    finally:
        _TAGS.reset(token)


def inherited(tag: str) -> str:
    """A tag that runs get which begin here; empty where there is none."""
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
    """Begins the record of a training, or resumes it after a step; -1 keeps no earlier line.

    A resumed training stays one run, unless steps of it are trained again with other settings. A
    record is kept up to date for `mlflow-sync` while no tracker is in use.
    """
    wanted, record = addresses(options, folder.root), RunRecord.find(folder)
    kept, dropped = kept_lines(folder.metrics, keep_through=keep_through, is_evaluated=is_evaluated)
    # On disk before the file is cut: after a kill between the two, nothing else would tell.
    if record:
        before, numbers = record.facts.tags.get(NUMBERS_TAG), tags.get(NUMBERS_TAG, "")
        if before and before != numbers and (dropped or not kept):
            record.replace_run(numbers, keeps_facts=bool(kept))
        record.resume(kept)
    metrics = MetricsLog(folder.metrics, kept)
    if not (wanted or record):
        return Run(folder, metrics)
    record = record or RunRecord.new(folder, redacted(options.run_name or name))
    run = Run(folder, metrics, record)
    if options.upload_model:
        run.wait_seconds = {**WAIT_SECONDS, "FINISHED": UPLOAD_SECONDS}
    run.set_tags({**_version_tags(), **_TAGS.get(), **tags})
    run.send_to(wanted, options)  # last: from here on threads run, which `finish` ends
    return run


@contextmanager
def recorded(
    options: TrackingOptions, home: Path, stage: str, *, name: str = "", is_alone: bool = True
) -> Iterator[Run]:
    """Records a run that is not a training, in the outbox of the folder that it makes.

    A process that is alone there also sends earlier runs that were not sent; those whose process
    was killed get the status KILLED.
    """
    wanted = addresses(options, home)
    if not wanted:
        yield Run(RunFolder(home))
        return
    own: list[RunFolder] = []
    earlier: list[RunRecord] = []
    with ExitStack() as stack:
        # After the locks, which are in their folders.
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
        run.send_to(wanted, options, home=home, earlier=earlier)
        run.begin_sending()
        status: Status = "FAILED"
        try:
            yield run
            status = "FINISHED"
        except (Interrupted, KeyboardInterrupt):
            status = "KILLED"
            raise
        finally:
            with log_failure("No record of how the run ended"):
                run.finish(status)


def _version_tags() -> dict[str, str]:
    """The versions that the numbers of a run may depend on."""
    packages = ("torch", "transformers", "deepspeed")
    versions = {f"{name}.version": version(name) for name in packages}
    return {"align.version": __version__, **versions}


class Run:
    """Writes numbers to metrics.jsonl and all else to the record; uploaders send both.

    Without a metrics log it keeps no numbers, without a record it writes nothing else.
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
        wanted: Mapping[str, str],
        options: TrackingOptions,
        *,
        home: Path | None = None,
        earlier: Sequence[RunRecord] = (),
    ) -> None:
        """Sends the run to trackers by their addresses, once `begin_sending` is called.

        Each gets earlier runs of `home` as well that were for the same store.
        """
        stores = {}
        for name, address in wanted.items():
            tracker, experiment = tracker_of(name), options.experiment
            if experiment == TrackingOptions().experiment:
                experiment = os.environ.get(tracker.experiment_variable) or experiment
            if known := self.record.facts.stores.get(name):  # it is the same from every shell
                experiment = known.experiment
            stores[name] = Store(tracker.plain_address(address), redacted(experiment))
        self.record.add_stores(stores)
        for name, address in wanted.items():
            self._quiet.enter_context(quiet(name))
            known_there = [
                one
                for one in earlier
                if name in one.facts.stores
                and one.facts.stores[name].address == stores[name].address
            ]
            senders = [Sender(name, address, one) for one in (self.record, *known_there)]
            self.uploaders.append(Uploader(senders, f"align mlflow-sync {home or self._root}"))

    @property
    def run_ids(self) -> dict[str, str]:
        """The id of this run in each store that has answered."""
        found = {name: self.record.sent(name).run_id for name in self.record.facts.stores}
        return {name: run_id for name, run_id in found.items() if run_id}

    def origins(self) -> dict[str, str]:
        """The trackers' ids of this run, and the tag that finds it sooner or later."""
        found = {}
        for name in self.record.facts.stores:
            if name in TRACKERS:  # else it is another install's
                title = tracker_of(name).title
                found[f"{title} run"] = self.run_ids.get(name, "not named yet")
                found[f"{title} tag {KEY_TAG}"] = self.record.facts.key
        return found

    def log_params(self, params: Mapping[str, object]) -> None:
        """Records flat settings; a store keeps the first value, so a later one becomes a tag."""
        facts = self.record.facts
        values = {name: redacted(str(value)) for name, value in params.items()}
        changed = {f"changed.{k}": v for k, v in values.items() if facts.params.get(k, v) != v}
        self.record.change(params={**values, **facts.params}, tags={**facts.tags, **changed})

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Writes a line of metrics.jsonl, and shows it to the callbacks."""
        if self._metrics:
            line = self._metrics.append(metrics, step=step)
            for callback in self.callbacks:
                callback(step, line)

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """Records input data, by a digest that align computed."""
        data = Dataset(redacted(name), digest, redacted(source), context)
        self.record.change(datasets=(*dict.fromkeys((*self.record.facts.datasets, data)),))

    def log_files(self, files: Iterable[InputEntry]) -> None:
        """Records the data files that a cache is made of."""
        for one in files:
            self.log_dataset(one.name, digest=one.sha256, source=one.name, context="reference")

    def log_artifact(self, path: Path) -> None:
        """Records a file or folder to keep with the run; again when it has changed.

        A file elsewhere is copied into the run.
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
        """Records the path of the model that this run made; the model itself stays there."""
        model = {redacted(str(folder.absolute())): dict(tags)}
        self.record.change(models={**self.record.facts.models, **model})

    def describe(self, text: str) -> None:
        """Records what a store shows beside the run; only the first call counts."""
        self.record.change(description=self.record.facts.description or redacted(text))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags to search by."""
        values = {name: redacted(value) for name, value in tags.items()}
        self.record.change(tags={**self.record.facts.tags, **values})

    def begin_sending(self) -> None:
        """Lets the uploaders import libraries and send, beside the work."""
        for uploader in self.uploaders:
            uploader.begin()

    def sync(self) -> None:
        """Makes every line durable; call it before a checkpoint is saved."""
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
        finally:  # also where the disk is full
            for uploader in self.uploaders:
                uploader.end()
            with self._quiet:
                deadline = time.monotonic() + self.wait_seconds[status]
                for uploader in self.uploaders:
                    uploader.join(max(0.0, deadline - time.monotonic()))


class Uploader:
    """A thread that sends runs to one tracker every second, and waits a minute after a failure.

    It begins when it is asked to, or after `FIRST_STEP_SECONDS`. The command's own run is first,
    and its first failure is a warning; an earlier run that fails stays for the next command.
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
        """Sends from now on."""
        self._may_begin.set()

    def end(self) -> None:
        """Sends the rest; returns once the library is imported, which waits for no store."""
        self._is_over.set()
        self._may_begin.set()
        self._is_loaded.wait()

    def join(self, seconds: float) -> None:
        """Waits so long for the rest to be sent; the record has what is not."""
        self.thread.join(seconds)
        if not self._sender.is_complete:
            self._warn("did not take all in time")
        if self.thread.is_alive():  # the locks of the runs may be given back from now on
            self._earlier.clear()
            for sender in self._senders:
                sender.record.release()

    def _work(self) -> None:
        self._may_begin.wait(FIRST_STEP_SECONDS)
        took = retry_at = 0.0
        while True:
            is_over = self._is_over.is_set()
            # At the end a store that refused at once is asked again; one that hung is not.
            if time.monotonic() >= retry_at or (is_over and took < QUICK_SECONDS):
                started = time.monotonic()
                try:
                    try:
                        self._sender.load()
                    finally:
                        self._is_loaded.set()
                    started = time.monotonic()  # an import takes seconds whatever the store does
                    self._sender.send()
                    # At its end, what is left of the own run is first again.
                    while self._earlier and self._is_over.is_set() == is_over:
                        self._send_earlier(self._earlier.pop(0))
                except Exception as error:  # whatever the library of a tracker raises
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
        except Exception:  # likewise; its own command has warned of it
            logger.debug("%s", redacted(traceback.format_exc()))

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            logger.warning(
                "%s %s. The work continues; `%s` sends what is still missing at its end.",
                self._sender.place,
                what,
                self._command,
            )
        self._has_warned = True


class Sender:
    """Brings one tracker up to date with one run; doing it twice is doing it once."""

    def __init__(self, name: str, address: str, record: RunRecord) -> None:
        self.name, self.record = name, record
        self.numbers = 0  # sent by this object
        self.is_complete = False  # the tracker has all of an ended run
        self._address = address
        self._tracker: Tracker | None = None
        self._has_begun = False
        self._labels: object = None

    @property
    def place(self) -> str:
        """The store for messages; the secrets of its address are masked wherever they are then."""
        mask_secrets_of(self._address)
        address = masked_address(self._address) if "://" in self._address else self._address
        return f"{tracker_of(self.name).title} at {address}"

    def load(self) -> Tracker:
        """Imports the library; asks the store nothing."""
        self._tracker = self._tracker or tracker_of(self.name)(self._address)
        return self._tracker

    def send(self) -> None:
        """Sends what is missing; raises what the store raises, and resumes there next time."""
        if self.is_complete:
            return
        tracker, record = self.load(), self.record
        facts = record.facts  # with a status in it, no line or file is added after this
        sent = record.sent(self.name)
        has_begun, self._has_begun = self._has_begun, False  # until all calls have succeeded
        if not has_begun:
            if sent.run_id and not tracker.has(facts, sent.run_id):
                sent = Sent()  # the store lost it, so it is sent again from the first line
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
        self._has_begun = True

    def _keep(self, sent: Sent) -> Sent:
        self.record.keep_sent(self.name, sent)
        return sent


def reason_of(error: BaseException) -> str:
    """A store's error, in one line and without secrets."""
    text = redacted(str(error).strip()) or type(error).__name__
    if isinstance(error, StorageError):  # our own: all of it is useful
        return text.rstrip(".")
    return shown(text.partition("\n")[0])[:200].rstrip(".")
