"""The record of a run: a journal of its numbers, and ledgers of the rest, sent on to trackers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from ... import __version__
from ...schemas.cache import InputEntry
from ...schemas.config import TrackingOptions
from ...schemas.errors import Interrupted, log_failure
from ...schemas.safe_text import redacted
from ..storage.disk import fs
from ..storage.disk.locks import owner_lock
from ..storage.run.run_folder import RunFolder
from .delivery import PRIVATE, Senders
from .journal import MAX_PARAM, MAX_TAG, Callback, Journal, key_of, open_journal, shortened
from .outbox import Ledger, close_record, new_record, now_ms, open_ledger, remove_if_sent
from .tracker import (
    GOES_ON_TAG,
    KEY_TAG,
    NUMBERS_TAG,
    TRACKERS,
    DatasetNote,
    ModelLink,
    Status,
    addresses,
    kind_of,
)

# Who stops a process by a signal kills it half a minute later.
PATIENCE_SECONDS = {"FINISHED": 30.0, "FAILED": 15.0, "KILLED": 5.0}
UPLOAD_SECONDS = 6 * 3600.0


_NOTHING: Mapping[str, str] = MappingProxyType({})
_TAGS: ContextVar[Mapping[str, str]] = ContextVar("tags", default=_NOTHING)
_PARENTS: ContextVar[Mapping[str, str]] = ContextVar("parents", default=_NOTHING)  # id by tracker


@contextmanager
def tagged(tags: Mapping[str, str], parent: Run | None = None) -> Iterator[None]:
    """Gives every run that begins inside these tags, and the run that it belongs to."""
    own = _TAGS.set({**_TAGS.get(), **tags})
    above = _PARENTS.set(parent.run_ids if parent else _PARENTS.get())
    try:
        yield
    finally:
        _PARENTS.reset(above)
        _TAGS.reset(own)


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
    """Begins the record of a run, or continues it after a step; -1 keeps no earlier line.

    A ledger of a tracker that is left out this time is kept up to date, for `mlflow-sync`.
    """
    journal = open_journal(folder.metrics, keep_through=keep_through, is_evaluated=is_evaluated)
    wanted = addresses(options, folder.root)
    names = [one for one in TRACKERS if one in wanted or folder.ledger(one).exists()]
    ledgers = [_open_ledger(one, options, folder, name, wanted.get(one, "")) for one in names]
    for ledger in ledgers:
        size, begun = folder.metrics.stat().st_size, ledger.record.tags.get(NUMBERS_TAG)
        is_same = begun == tags.get(NUMBERS_TAG)
        is_other = bool(begun and not is_same and not size)  # another run, of which nothing is kept
        if journal.dropped or ledger.record.metrics_sent > size or is_other:
            ledger.cut_back(size, is_same=is_same)
        _add_tags(ledger, tags)
    senders = Senders(ledgers, wanted, folder.metrics, folder.root) if wanted else None
    return Run(folder.root, journal, ledgers, senders, uploads=options.upload_model)


@contextmanager
def recorded(
    options: TrackingOptions,
    home: Path,
    stage: str,
    *,
    name: str = "",
    is_alone: bool = True,
    goes_on_from: Mapping[str, str] = _NOTHING,
) -> Iterator[Run]:
    """Records the work on a cache or sweep, under this name or that of its stage.

    The record is in the outbox of that folder until all trackers were sent all of it. Unless a
    process is alone there, it leaves the rest of the outbox as it is.
    """
    wanted = addresses(options, home)
    if not wanted:
        yield Run(home)
        return
    folder = new_record(home, is_alone=is_alone)
    with ExitStack() as stack:
        # After the lock, which is in the folder.
        stack.callback(remove_if_sent, folder, is_alone=is_alone)
        stack.enter_context(owner_lock(folder.root, stage))
        status: Status = "FAILED"
        journal = open_journal(folder.metrics, keep_through=-1)
        ledgers = [
            _open_ledger(one, options, folder, name or stage, at) for one, at in wanted.items()
        ]
        for ledger in ledgers:
            before = goes_on_from.get(ledger.kind.name)
            _add_tags(ledger, {**({GOES_ON_TAG: before} if before else {}), "align.stage": stage})
        senders = Senders(ledgers, wanted, folder.metrics, home)
        run = Run(folder.root, journal, ledgers, senders)
        try:
            # A library is imported by then, and what belongs to this run can name it.
            senders.wait_for_answers(PATIENCE_SECONDS["FINISHED"])
            yield run
            status = "FINISHED"
        except (Interrupted, KeyboardInterrupt):
            status = "KILLED"
            raise
        finally:
            with log_failure("No record of how the run ended"):
                run.finish(status)
                for ledger in senders.complete:
                    close_record(ledger, folder)


def _open_ledger(
    tracker: str, options: TrackingOptions, folder: RunFolder, name: str, address: str
) -> Ledger:
    kind = kind_of(tracker)
    return open_ledger(
        kind,
        folder,
        address=address,
        experiment=kind.experiment(options),
        run_name=redacted(options.run_name or name),
    )


def _add_tags(ledger: Ledger, tags: Mapping[str, str]) -> None:
    """The tags of a run, with those that it inherits."""
    parent = _PARENTS.get().get(ledger.kind.name)
    above = {**_TAGS.get(), **({ledger.kind.parent_tag: parent} if parent else {})}
    ledger.add("tags", _labels({**version_tags(), **above, **tags}))


def _labels(tags: Mapping[str, str]) -> dict[str, str]:
    return {key_of(name): shortened(value, MAX_TAG) for name, value in tags.items()}


def version_tags() -> dict[str, str]:
    """The versions that the numbers of a run may depend on."""
    tags = {"align.version": __version__}
    for package in ("torch", "transformers", "deepspeed"):
        try:
            tags[f"{package}.version"] = version(package)
        except PackageNotFoundError:
            continue
    return tags


class Run:
    """Writes numbers to the journal and all else to the ledgers; other threads send both.

    Without a journal it keeps no numbers, without a ledger nothing is for a tracker.
    """

    def __init__(
        self,
        root: Path,
        journal: Journal | None = None,
        ledgers: Sequence[Ledger] = (),
        senders: Senders | None = None,
        *,
        uploads: bool = False,
    ) -> None:
        self.callbacks: tuple[Callback, ...] = ()
        self._root = root.absolute()
        self._journal = journal
        self._ledgers = ledgers
        self._senders = senders
        self._patience = PATIENCE_SECONDS | ({"FINISHED": UPLOAD_SECONDS} if uploads else {})

    @property
    def run_ids(self) -> dict[str, str]:
        """The id of this run by tracker; of those whose store has answered."""
        found = {ledger.kind.name: ledger.record.run_id for ledger in self._ledgers}
        return {name: run_id for name, run_id in found.items() if run_id}

    def origins(self) -> dict[str, str]:
        """The trackers' ids of this run, and the tag by which they find it, sooner or later."""
        found = {}
        for ledger in self._ledgers:
            title, record = ledger.kind.title, ledger.record
            found[f"{title} run"] = record.run_id or "not named yet"
            found[f"{title} tag {KEY_TAG}"] = record.key
        return found

    def log_params(self, params: Mapping[str, str]) -> None:
        """Records flat settings; a store keeps the first value, so a later one becomes a tag."""
        for ledger in self._ledgers:
            values = {key_of(k): shortened(str(v), MAX_PARAM) for k, v in params.items()}
            known = ledger.record.params
            changed = {f"changed.{k}": v for k, v in values.items() if known.get(k, v) != v}
            ledger.add("params", {k: v for k, v in values.items() if k not in known})
            ledger.add("tags", _labels(changed))

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Writes the numbers of one step as one line."""
        if self._journal:
            line = self._journal.append(metrics, step=step)
            for callback in self.callbacks:
                callback(step, line)

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """Records the input data, under our own digest."""
        note = DatasetNote(redacted(name), digest, redacted(source), context)
        for ledger in self._ledgers:
            ledger.append("datasets", note)

    def log_files(self, files: Iterable[InputEntry], *, context: str) -> None:
        """Records the data files that a cache is made of."""
        notes = [
            DatasetNote(redacted(one.name), one.sha256, redacted(one.name), context)
            for one in files
        ]
        for ledger in self._ledgers:
            ledger.append("datasets", *notes)

    def log_artifact(self, path: Path) -> None:
        """Records a file or folder to keep with the run; again when it has changed.

        Of a file elsewhere a copy is kept: only files inside the run are sent.
        """
        if not self._ledgers:
            return
        whole = path.absolute()
        if not whole.is_relative_to(self._root):
            whole = self._root / PRIVATE / "artifacts" / path.name
            fs.make_folder(whole.parent)
            fs.publish(whole, fs.read_bytes(path))
        for ledger in self._ledgers:
            ledger.renew_artifact(str(whole.relative_to(self._root)))

    def log_model_link(self, folder: Path, *, tags: Mapping[str, str]) -> None:
        """Records the path of the model that this run made; the model itself stays there."""
        where = redacted(str(folder.absolute()))
        for ledger in self._ledgers:
            ledger.link_model(ModelLink(where, _labels(tags), ""))

    def describe(self, text: str) -> None:
        """Records what a store shows beside the run; only the first call counts."""
        for ledger in self._ledgers:
            if ledger.kind.note_tag not in ledger.record.tags:
                ledger.add("tags", _labels({ledger.kind.note_tag: text}))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags to search by."""
        for ledger in self._ledgers:
            ledger.add("tags", _labels(tags))

    def begin_sending(self) -> None:
        """Starts the threads that import libraries and send to stores, beside the work."""
        if self._senders:
            self._senders.begin()

    def sync(self) -> None:
        """Makes every line durable; call it before a checkpoint is saved."""
        if self._journal:
            self._journal.sync()

    def finish(self, status: Status) -> None:
        """Records the final status; only the first call counts."""
        if self._journal:
            self._journal.sync()
            self._journal.close()
            self._journal = None
        running = [ledger for ledger in self._ledgers if not ledger.record.status]
        for ledger in running:
            ledger.change(status=status, ended_ms=now_ms())
        if running and self._senders:
            self._senders.finish(self._patience[status])
