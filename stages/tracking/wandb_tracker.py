"""Weights & Biases as a tracker: an offline run in the folder of the run, for `wandb sync`."""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...schemas.config import TrackingOptions
from ...schemas.errors import StorageError
from ...schemas.safe_text import redacted
from ..storage.disk import fs
from .journal import Entry
from .tracker import GOES_ON_TAG, GROUP_TAG, ROUNDS_TAG, ModelLink, RunRecord, TrackerKind

FOLDER = "wandb"  # in the folder of the run, or in WANDB_DIR; wandb names it so
FILES = "align"  # among the files of the run, whose config.yaml is W&B's own
NOTE = "align.json"
NOTE_TAG = "align.description"
STEP = "step"  # the axis of every chart
RUN_KEY = re.compile(r"[0-9a-f]{16}")
WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,14})")  # which JavaScript does not round
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)([.][0-9]+)?(e[-+]?[0-9]+)?")
LONGEST_PROJECT = 128
FLUSH_SECONDS = 1.0  # `wandb beta sync --live` reads what is flushed
REPORTING = "WANDB_ERROR_REPORTING"
PROJECT = "WANDB_PROJECT"


@dataclass
class Told:
    """What a run was told, and wandb's own object while it is open in this process."""

    journal: int = 0  # in bytes
    facts: dict[str, Any] = field(default_factory=dict)
    run: Any = None
    is_broken: bool = False


# One process cannot open a run twice, and a fork cannot use what its parent has opened.
_OPEN: dict[tuple[int, Path, str], Told] = {}


class WandbTracker:
    """One run as an offline run, written from its first line to its end by one process.

    A run that was not ended, or that goes on, is written anew: wandb adds to no file. Its step is
    the offset of a line in the journal, under which no line can be there twice.
    """

    def __init__(self, address: str) -> None:
        self._root = Path(address)
        self._wandb = importlib.import_module("wandb")
        self._record_key = ""
        self._told = Told()

    def begin(self, record: RunRecord) -> str:
        """The key of the run; empty if not all of what it was told is there."""
        self._record_key = record.key
        if self._root.is_symlink():
            raise StorageError(f"{self._root} is a link, and leads elsewhere. Remove it.")
        told = self._opened() or self._ended(record)
        if told is None and record.run_id:
            return ""
        self._told = told or self._open(record)
        if not record.status:
            self._tell(status="RUNNING")
        return record.key

    def label(self, record: RunRecord) -> None:
        """All of it as config, where W&B filters; the description as notes."""
        self._tell(**_labels(record))

    def log(self, entries: Sequence[Entry]) -> int:
        """A row for each line that the run lacks."""
        new = [entry for entry in entries if entry.end > self._told.journal]
        for entry in new:
            if entry.points:
                with self._using() as run:
                    run.log(_row(entry), step=entry.end, commit=True)
            self._told.journal = entry.end
        return sum(len(entry.points) for entry in new)

    def artifact(self, path: Path, *, under: str) -> None:
        """A copy among the files of the run, which takes no room where there can be links."""
        with self._using() as run:
            target = Path(run.dir) / FILES / under / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                fs.remove_tree(target)
                shutil.copytree(path, target, copy_function=_copy)
            else:
                _copy(path, target)
            files = [target] if target.is_file() else [*target.rglob("*")]
            for file in files:
                if file.is_file():
                    run.save(glob.escape(str(file)), base_path=run.dir, policy="now")

    def model(self, link: ModelLink) -> str:
        """The path of the model, in the config."""
        model_id = _model_id(link)
        models = self._told.facts.get("models", {})
        self._tell(models={**models, model_id: _model(link)})
        return model_id

    def end(self, status: str, ended_ms: int) -> None:
        """The status, in the config; W&B's own is that of the process, set when all is sent."""
        self._tell(status=status)

    def close(self) -> None:
        """Ends the offline run; only then is it said to be there."""
        told = self._told
        if told.run is None:
            return
        with self._using() as run:
            run.finish(exit_code=0 if told.facts.get("status") == "FINISHED" else 1)
            fs.fsync(Path(run.settings.sync_file))
            self._keep(told, ends_at=Path(run.settings.sync_file).stat().st_size)
        told.run = None
        _OPEN.pop(self._place, None)

    @property
    def _place(self) -> tuple[int, Path, str]:
        return os.getpid(), self._root, self._record_key

    def _opened(self) -> Told | None:
        """The run as this process has it open, unless its file is gone or a call has failed."""
        told = _OPEN.get(self._place)
        if told is None or (not told.is_broken and Path(told.run.settings.sync_file).exists()):
            return told
        self._abandon(self._place)
        return None

    def _abandon(self, place: tuple[int, Path, str]) -> None:
        """Closes a run that is not to be read."""
        if told := _OPEN.pop(place, None):
            try:
                told.run.finish(exit_code=1)
            except ConnectionError:  # wandb's service has died, and with it all that it had open
                with suppress(ConnectionError):
                    self._wandb.teardown()

    def _ended(self, record: RunRecord) -> Told | None:
        """The run as it was ended, if there is nothing to add to it."""
        for folder in self._folders(record.key):
            note = _read_note(folder)
            file = folder / f"run-{record.key}.wandb"
            # At least: wandb's service may write its last bytes after the run was finished.
            ends_at = note.get("ends_at")
            is_whole = type(ends_at) is int and file.exists() and file.stat().st_size >= ends_at > 0
            has_all = record.metrics_sent == note.get("journal") and all(record.artifacts.values())
            if is_whole and has_all and note.get("facts") == _facts(record):
                return Told(record.metrics_sent, note["facts"])
        return None

    def _open(self, record: RunRecord) -> Told:
        self._root.mkdir(parents=True, exist_ok=True)
        for folder in [*self._folders(record.key), *self._given_up(record)]:
            fs.remove_tree(folder)
        settings = self._wandb.Settings(
            mode="offline",
            root_dir=str(self._root.parent),
            silent=True,
            console="off",
            host="-",  # nothing of the machine is recorded
            disable_git=True,
            disable_code=True,
            save_code=False,
            symlink=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            x_start_time=record.began_ms / 1000,
            x_transaction_log_flush_interval=FLUSH_SECONDS,
        )
        with _plain_project_named():
            run = self._wandb.init(
                id=record.key,
                project=_plain_project(record.experiment),
                name=record.run_name or None,
                group=_group(record.tags) or None,
                job_type=record.tags.get("align.stage") or None,
                settings=settings,
                reinit="create_new",  # beside a run that somebody else has open here
            )
        told = Told(run=run)
        if Path(run.settings.sync_dir).parent != self._root:  # it took a folder for passing files
            run.finish(exit_code=1)
            fs.remove_tree(Path(run.settings.sync_dir))
            raise StorageError(f"{self._root} cannot be written")
        run.define_metric("*", step_metric=STEP)
        self._keep(told, began_ms=record.began_ms)
        _OPEN[self._place] = told
        return told

    def _tell(self, **facts: Any) -> None:
        """Puts into the config what is not there yet."""
        known = self._told.facts
        if facts.items() <= known.items():
            return
        changed = {**known, **facts}
        params = {name: _plain(value) for name, value in changed.get("params", {}).items()}
        own = {name: value for name, value in changed.items() if name != "params"}
        with self._using() as run:
            run.config.update({**params, FILES: own}, allow_val_change=True)
            note = changed.get("tags", {}).get(NOTE_TAG, "")
            if note and note != known.get("tags", {}).get(NOTE_TAG):
                run.notes = note
        self._told.facts = changed

    @contextmanager
    def _using(self) -> Iterator[Any]:
        """The open run; of one that fails, nothing is believed any more."""
        if self._told.run is None:
            raise StorageError(f"the run {self._record_key} has been ended. Begin it again.")
        try:
            yield self._told.run
        except BaseException:
            self._told.is_broken = True
            raise

    def _folders(self, key: str) -> list[Path]:
        return sorted(self._root.glob(f"offline-run-*-{key}*"))

    def _given_up(self, record: RunRecord) -> list[Path]:
        """What the same run had of steps that were trained again after a kill."""
        before = record.tags.get(GOES_ON_TAG, "")
        if not RUN_KEY.fullmatch(before):
            return []
        self._abandon((os.getpid(), self._root, before))
        found = self._folders(before)
        return [one for one in found if _read_note(one).get("began_ms") == record.began_ms]

    def _keep(self, told: Told, *, ends_at: int = 0, began_ms: int = 0) -> None:
        folder = Path(told.run.settings.sync_dir)
        began_ms = began_ms or _read_note(folder).get("began_ms", 0)
        note = {"began_ms": began_ms, "ends_at": ends_at, "journal": told.journal}
        payload = json.dumps({**note, "facts": told.facts}).encode()
        fs.publish(folder / NOTE, payload)


def _read_note(folder: Path) -> dict[str, Any]:
    """What is said of an offline run; nothing where it cannot be read."""
    try:
        note = json.loads(fs.read_bytes(folder / NOTE))
    except (OSError, ValueError, RecursionError, StorageError):
        return {}
    return note if isinstance(note, dict) else {}


def _row(entry: Entry) -> dict[str, float]:
    numbers = {point.key: point.value for point in entry.points}
    return {**numbers, STEP: entry.step, "_timestamp": entry.points[0].time_ms / 1000}


def _labels(record: RunRecord) -> dict[str, Any]:
    data = {note.digest: f"{note.name}, {note.context}, {note.source}" for note in record.datasets}
    return {"params": record.params, "tags": record.tags, "data": data}


def _facts(record: RunRecord) -> dict[str, Any]:
    """All that the config has to say of a run of which all was sent."""
    models = {link.model_id: _model(link) for link in record.models}
    return {**_labels(record), **({"models": models} if models else {}), "status": record.status}


def _model_id(link: ModelLink) -> str:
    return hashlib.sha256(link.folder.encode()).hexdigest()[:16]


def _model(link: ModelLink) -> dict[str, str]:
    return {"folder": link.folder, **link.tags}


def _group(tags: Mapping[str, str]) -> str:
    """The name of the sweep's folder, or of that of the rounds."""
    return Path(tags.get(GROUP_TAG) or tags.get(ROUNDS_TAG, "")).name


def _plain(text: str) -> str | float | bool:
    """A setting as a number or a truth where it is one: W&B draws and compares them."""
    if text in ("True", "False"):
        return text == "True"
    if not NUMBER.fullmatch(text):
        return text
    if WHOLE.fullmatch(text):
        return int(text)
    number = float(text)
    return number if math.isfinite(number) else text


def _copy(path: Path | str, target: Path | str) -> None:
    """A second name of the file, or a copy where it can have none."""
    Path(target).unlink(missing_ok=True)
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError:
        shutil.copyfile(path, target)


def _address(options: TrackingOptions, home: Path) -> str:
    """Where the offline runs are; none where somebody has asked wandb for another mode."""
    if os.environ.get("WANDB_MODE", "offline") != "offline":
        return ""
    return str(Path(os.environ.get("WANDB_DIR") or home).absolute() / FOLDER)


def _project(options: TrackingOptions) -> str:
    """The project of the config, else the environment, else the default."""
    default = TrackingOptions().experiment
    named = options.experiment if options.experiment != default else os.environ.get(PROJECT)
    return redacted(named or default)


def _plain_project(name: str) -> str:
    """The name of a project as wandb takes it."""
    return re.sub(r"[/\\#?%:]", "-", name)[:LONGEST_PROJECT]


@contextmanager
def _plain_project_named() -> Iterator[None]:
    """Makes WANDB_PROJECT one that wandb takes: it reads it before it looks at what it is told."""
    named = os.environ.get(PROJECT)
    if named is None:
        yield
        return
    os.environ[PROJECT] = _plain_project(named)
    try:
        yield
    finally:
        os.environ[PROJECT] = named


def _load(_: str) -> None:
    importlib.import_module("wandb")


@contextmanager
def _without_reports() -> Iterator[None]:
    """Keeps wandb from reporting its use and its errors, unless somebody has asked for it."""
    is_unset = REPORTING not in os.environ
    os.environ.setdefault(REPORTING, "false")
    try:
        yield
    finally:
        if is_unset:
            os.environ.pop(REPORTING, None)


def failures() -> tuple[type[BaseException], ...]:
    """The exceptions of wandb; a library that was never imported cannot have raised any."""
    named = {
        "wandb.errors": ("Error",),
        "wandb.sdk.mailbox.mailbox": ("MailboxClosedError",),
        "wandb.sdk.mailbox.mailbox_handle": ("HandleAbandonedError", "ServerResponseError"),
    }
    return tuple(
        getattr(sys.modules[module], name)
        for module, names in named.items()
        if module in sys.modules
        for name in names
    )


KIND = TrackerKind(
    name="wandb",
    title="Weights & Biases",
    named_by="the folder wandb of the run or of WANDB_DIR; WANDB_MODE has to be offline or unset",
    library="wandb",
    address=_address,
    open=WandbTracker,
    close=WandbTracker.close,
    experiment=_project,
    load=_load,
    quiet=_without_reports,
    failures=failures,
    note_tag=NOTE_TAG,
    # It goes where the run's folder goes, unless somebody has named another.
    plain=lambda address: address if os.environ.get("WANDB_DIR") else FOLDER,
)
