"""Sends runs to trackers: from a thread while the work goes on, and by `align mlflow-sync`."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ...schemas.errors import StorageError
from ...schemas.safe_text import mask_secrets_of, masked_address, redacted, shown
from ..storage.disk.lines import line_start
from .journal import Entry, read_entries
from .run_record import COPIES, RunRecord, Sent
from .tracker import Tracker, tracker_of

logger = logging.getLogger("align")

NUMBERS_PER_CALL = 1000
SECONDS_PER_TICK = 1.0
RETRY_SECONDS = 60.0
QUICK_SECONDS = 1.0
# An import takes seconds of the interpreter, which the first step of a training needs.
FIRST_STEP_SECONDS = 10.0


class Sender:
    """Brings one tracker up to date with one run; doing it twice is doing it once."""

    def __init__(self, name: str, address: str, record: RunRecord) -> None:
        self.record = record
        self.numbers = 0  # sent by this object
        self.is_complete = False  # the tracker has all of an ended run
        self.retry_at = self.took = 0.0  # of the uploader: after a failure; the last attempt
        self._name = name
        self._address = address
        self._tracker: Tracker | None = None
        self._has_begun = False
        self._labels: object = None

    def load(self) -> Tracker:
        """Imports the library; asks the store nothing."""
        if self._tracker is None:
            self._tracker = tracker_of(self._name)(self._address)
        return self._tracker

    def send(self) -> None:
        """Sends what is missing; raises what the store raises, and resumes there next time."""
        if self.is_complete:
            return
        tracker, record = self.load(), self.record
        facts = record.facts  # with a status in it, no line or file is added after this
        is_begun, self._has_begun = self._has_begun, False  # until all calls have succeeded
        if not is_begun and not self._begin(tracker):
            self.is_complete = True
            return
        sent = record.sent(self._name)
        for entries in _batches(record.folder.metrics, sent.offset):
            tracker.log(entries)
            self.numbers += sum(len(entry.metrics) for entry in entries)
            sent = self._keep(replace(sent, offset=entries[-1].end))
        labels = replace(facts, files={})
        if labels != self._labels:
            tracker.label(facts)
            self._labels = labels
        for name, logged in [*record.unsent_files(sent)]:
            folder = "" if name.startswith(COPIES) else str(Path(name).parent)
            tracker.file(record.folder.root / name, "" if folder == "." else folder)
            sent = self._keep(replace(sent, files={**sent.files, name: logged}))
        if facts.status:
            tracker.close(facts)
            self._keep(replace(sent, status=facts.status))
        self.is_complete = bool(facts.status)
        self._has_begun = True

    def _begin(self, tracker: Tracker) -> bool:
        """Finds or makes the run; False if the store has all of it already."""
        record, self._labels = self.record, None
        sent = record.sent(self._name)
        if sent.run_id and not tracker.has(record.facts, sent.run_id):
            sent = Sent()  # the store lost it, so it is sent again from the first line
        elif record.is_sent(self._name):
            return False
        sent = replace(sent, offset=line_start(record.folder.metrics, sent.offset), status="")
        self._keep(tracker.begin(record.facts, sent, record.folder.metrics))
        return True

    def _keep(self, sent: Sent) -> Sent:
        self.record.keep_sent(self._name, sent)
        return sent


def _batches(metrics: Path, start: int) -> Iterator[list[Entry]]:
    entries: list[Entry] = []
    numbers = 0
    for entry in read_entries(metrics, start):
        entries.append(entry)
        numbers += len(entry.metrics)
        if numbers >= NUMBERS_PER_CALL:
            yield entries
            entries, numbers = [], 0
    if entries:
        yield entries


class Uploader:
    """A thread that sends runs to one tracker every second, and waits a minute after a failure.

    It begins when it is asked to, or after `FIRST_STEP_SECONDS`.
    """

    def __init__(self, name: str, address: str, records: Sequence[RunRecord], home: Path) -> None:
        self._title, self._address, self._home = tracker_of(name).title, address, home
        self._senders = [Sender(name, address, record) for record in records]
        self._may_begin, self._is_over = threading.Event(), threading.Event()
        self._is_loaded, self._has_tried = threading.Event(), threading.Event()
        self._has_warned = False
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def begin(self) -> None:
        """Sends from now on."""
        self._may_begin.set()

    def wait(self, seconds: float) -> None:
        """Waits no longer than this until the store has answered or failed once."""
        self._has_tried.wait(seconds)

    def end(self) -> None:
        """Sends the rest; returns once the library is imported, which waits for no store."""
        self._is_over.set()
        self._may_begin.set()
        self._is_loaded.wait()

    def join(self, seconds: float) -> None:
        """Waits so long for the rest to be sent; the record has what is not."""
        self.thread.join(seconds)
        if self.thread.is_alive() or not all(one.is_complete for one in self._senders):
            self._warn("did not take all in time")

    def _work(self) -> None:
        self._may_begin.wait(FIRST_STEP_SECONDS)
        while True:
            is_over = self._is_over.is_set()
            for sender in self._senders:
                is_due = time.monotonic() >= sender.retry_at
                # At the end a store that refuses at once is asked again; one that hangs is not.
                if is_due or (is_over and sender.took < QUICK_SECONDS):
                    self._attempt(sender)
                if sender.retry_at and sender is self._senders[0]:
                    break  # the store is down, and may take its time to say so of each
            if is_over:
                return
            self._is_over.wait(SECONDS_PER_TICK)

    def _attempt(self, sender: Sender) -> None:
        started, sender.retry_at = time.monotonic(), 0.0
        try:
            try:
                sender.load()
            finally:
                self._is_loaded.set()
            started = time.monotonic()  # an import takes seconds of a store that refuses at once
            sender.send()
        except Exception as error:  # whatever the library of a tracker raises
            sender.retry_at = time.monotonic() + RETRY_SECONDS
            self._warn(f"failed: {reason_of(error)}")
            logger.debug("%s", redacted(traceback.format_exc()))
        finally:
            sender.took = time.monotonic() - started
            self._has_tried.set()

    def _warn(self, what: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%s at %s %s. The work continues; `align mlflow-sync %s` sends what is still missing "
            "at its end.",
            self._title,
            shown_address(self._address),
            what,
            self._home,
        )


def shown_address(address: str) -> str:
    """A store's address for messages; its secrets are masked wherever they are from now on."""
    mask_secrets_of(address)
    return masked_address(address) if "://" in address else address


def reason_of(error: BaseException) -> str:
    """A store's error, in one line and without secrets."""
    text = redacted(str(error).strip()) or type(error).__name__
    if isinstance(error, StorageError):  # our own: all of it is useful
        return text.rstrip(".")
    return shown(text.partition("\n")[0])[:200].rstrip(".")
