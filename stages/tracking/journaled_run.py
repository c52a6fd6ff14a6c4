"""The record of a run as its command writes it; trackers are sent it by threads beside the work."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from ... import __version__
from ...schemas.cache import InputEntry
from ...schemas.config import TrackingOptions
from ...schemas.errors import Interrupted, log_failure
from ...schemas.safe_text import redacted
from ..storage.disk import fs
from ..storage.disk.locks import owner_lock, try_owner_lock
from ..storage.run.run_folder import RunFolder
from .journal import Callback, Journal, kept_lines, open_journal
from .run_record import (
    COPIES,
    KEY_TAG,
    NUMBERS_TAG,
    PARENT_TAG,
    Dataset,
    RunRecord,
    Status,
    new_facts,
    new_outbox_folder,
    now_ms,
    remove_remnants,
    remove_sent,
    unsent_runs,
)
from .tracker import TRACKERS, addresses, tracker_of
from .uploader import Uploader

# A process that is stopped by a signal is often killed half a minute later.
WAIT_SECONDS = {"FINISHED": 30.0, "FAILED": 15.0, "KILLED": 5.0}
UPLOAD_SECONDS = 6 * 3600.0

_NO_TAGS: Mapping[str, str] = MappingProxyType({})
_TAGS: ContextVar[Mapping[str, str]] = ContextVar("tags", default=_NO_TAGS)


@contextmanager
def tagged(tags: Mapping[str, str], parent: Run | None = None) -> Iterator[None]:
    """Gives these tags to every run that begins inside, and the run that it belongs to.

    It waits until each store had a chance to make the parent, which trackers find by its key.
    """
    above = {}
    if parent and parent.record:
        above = {PARENT_TAG: parent.record.facts.key}
        for uploader in parent.uploaders:
            uploader.wait(WAIT_SECONDS["FINISHED"])
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
    if record and (before := record.facts.tags.get(NUMBERS_TAG)):
        numbers = tags.get(NUMBERS_TAG, "")
        if before != numbers and (dropped or not kept):
            record.replace_run(numbers, keeps_facts=bool(kept))
    journal = open_journal(folder.metrics, kept)
    if not (wanted or record):
        return Run(folder.root, journal)
    if record is None:
        record = RunRecord(folder, new_facts(options, name))
    record.cut_back(folder.metrics.stat().st_size)
    record.change(status="", ended_ms=0)
    run = Run(folder.root, journal, record, uploads_model=options.upload_model)
    run.send_to(wanted)
    run.set_tags({**_version_tags(), **_TAGS.get(), **tags})
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
        yield Run(home)
        return
    records: list[RunRecord] = []
    with ExitStack() as stack:
        # After the locks, which are in their folders.
        stack.callback(remove_sent, records, is_alone=is_alone)
        if is_alone:
            remove_remnants(home)
            for folder in unsent_runs(home):
                with log_failure("An earlier run is not sent"):
                    is_free = stack.enter_context(try_owner_lock(folder.root, stage))
                    if is_free and (left := RunRecord.find(folder)):
                        if not left.facts.status:
                            left.change(status="KILLED", ended_ms=now_ms())
                        records.append(left)
        folder = new_outbox_folder(home)
        stack.enter_context(owner_lock(folder.root, stage))
        journal = open_journal(folder.metrics)
        record = RunRecord(folder, new_facts(options, name or stage))
        run = Run(folder.root, journal, record, earlier=[*records])
        records.append(record)
        run.send_to(wanted, home)
        run.set_tags({**_version_tags(), **_TAGS.get(), "align.stage": stage})
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

    Without a journal it keeps no numbers, without a record no tracker is sent anything.
    """

    def __init__(
        self,
        root: Path,
        journal: Journal | None = None,
        record: RunRecord | None = None,
        *,
        earlier: Sequence[RunRecord] = (),
        uploads_model: bool = False,
    ) -> None:
        self.callbacks: tuple[Callback, ...] = ()
        self.record = record
        self.uploaders: list[Uploader] = []
        self._root = root.absolute()
        self._journal = journal
        self._earlier = earlier
        self._quiet = ExitStack()
        self._wait = WAIT_SECONDS | ({"FINISHED": UPLOAD_SECONDS} if uploads_model else {})

    def send_to(self, wanted: Mapping[str, str], home: Path | None = None) -> None:
        """Sends the run to these trackers by their addresses, once `begin_sending` is called."""
        assert self.record
        plain = {name: tracker_of(name).plain_address(at) for name, at in wanted.items()}
        self.record.send_to(plain)
        for name, address in wanted.items():
            of_others = [
                one for one in self._earlier if one.facts.trackers.get(name) == plain[name]
            ]
            self._quiet.enter_context(tracker_of(name).quiet())
            records = [self.record, *of_others]
            self.uploaders.append(Uploader(name, address, records, home or self._root))

    @property
    def run_ids(self) -> dict[str, str]:
        """The id of this run in each store that has answered."""
        if not self.record:
            return {}
        found = {name: self.record.sent(name).run_id for name in self.record.facts.trackers}
        return {name: run_id for name, run_id in found.items() if run_id}

    def origins(self) -> dict[str, str]:
        """The trackers' ids of this run, and the tag that finds it sooner or later."""
        found = {}
        if record := self.record:
            for name in record.facts.trackers:
                if name not in TRACKERS:  # another install's
                    continue
                title = tracker_of(name).title
                found[f"{title} run"] = record.sent(name).run_id or "not named yet"
                found[f"{title} tag {KEY_TAG}"] = record.facts.key
        return found

    def log_params(self, params: Mapping[str, object]) -> None:
        """Records flat settings; a store keeps the first value, so a later one becomes a tag."""
        if record := self.record:
            values = {name: redacted(str(value)) for name, value in params.items()}
            known = record.facts.params
            changed = {f"changed.{k}": v for k, v in values.items() if known.get(k, v) != v}
            record.change(params={**values, **known}, tags={**record.facts.tags, **changed})

    def log_metrics(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Writes a line of metrics.jsonl, and shows it to the callbacks."""
        if self._journal:
            line = self._journal.append(metrics, step=step)
            for callback in self.callbacks:
                callback(step, line)

    def log_dataset(self, name: str, *, digest: str, source: str, context: str) -> None:
        """Records input data, by a digest that align computed."""
        self._add_data([Dataset(redacted(name), digest, redacted(source), context)])

    def log_files(self, files: Iterable[InputEntry]) -> None:
        """Records the data files that a cache is made of."""
        names = [(redacted(one.name), one.sha256) for one in files]
        self._add_data([Dataset(name, digest, name, "reference") for name, digest in names])

    def _add_data(self, data: Sequence[Dataset]) -> None:
        if record := self.record:
            record.change(datasets=(*dict.fromkeys((*record.facts.datasets, *data)),))

    def log_artifact(self, path: Path) -> None:
        """Records a file or folder to keep with the run; again when it has changed.

        A file elsewhere is copied into the run.
        """
        if record := self.record:
            whole = path.absolute()
            if not whole.is_relative_to(self._root):
                whole = self._root / COPIES / path.name
                fs.make_folder(whole.parent)
                fs.publish(whole, fs.read_bytes(path))
            record.log_file(whole)

    def log_model_link(self, folder: Path, *, tags: Mapping[str, str]) -> None:
        """Records the path of the model that this run made; the model itself stays there."""
        if record := self.record:
            model = {redacted(str(folder.absolute())): dict(tags)}
            record.change(models={**record.facts.models, **model})

    def describe(self, text: str) -> None:
        """Records what a store shows beside the run; only the first call counts."""
        if self.record and not self.record.facts.description:
            self.record.change(description=redacted(text))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags to search by."""
        if record := self.record:
            values = {name: redacted(value) for name, value in tags.items()}
            record.change(tags={**record.facts.tags, **values})

    def begin_sending(self) -> None:
        """Lets the uploaders import libraries and send, beside the work."""
        for uploader in self.uploaders:
            uploader.begin()

    def sync(self) -> None:
        """Makes every line durable; call it before a checkpoint is saved."""
        if self._journal:
            self._journal.sync()

    def finish(self, status: Status) -> None:
        """Records the final status and waits for the uploaders; only the first call counts."""
        if self._journal:
            self._journal.sync()
            self._journal.close()
            self._journal = None
        if not self.record or self.record.facts.status:
            return
        self.record.change(status=status, ended_ms=now_ms())
        for uploader in self.uploaders:
            uploader.end()
        with self._quiet:
            deadline = time.monotonic() + self._wait[status]
            for uploader in self.uploaders:
                uploader.join(max(0.0, deadline - time.monotonic()))
