"""Sends MLflow what it missed of a run; sending it twice changes nothing.

The folder may come from someone else, so what it names is not trusted: the address is the user's
own or one given by hand, and only files inside the folder are sent.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..schemas.config import TrackingOptions
from ..schemas.errors import AlignError, StorageError, UsageError
from ..schemas.safe_text import redacted
from ..stages.storage.cache_folder import SCORES
from ..stages.storage.locks import owner_lock
from ..stages.storage.run_folder import RunFolder, read_ending
from ..stages.tracking.delivery import Delivery
from ..stages.tracking.journaled_run import Run, recorded, store_uri
from ..stages.tracking.mlflow_client import GROUP_TAG, PARENT_TAG, ROUNDS_TAG, MlflowStore
from ..stages.tracking.mlflow_silence import mlflow_silenced
from ..stages.tracking.outbox import (
    Ledger,
    address_of,
    close_record,
    failures,
    load_ledger,
    now_ms,
    plain_uri,
    reason_of,
    remove_if_sent,
    unsent_runs,
)
from .settings import FILE_NAME, load_settings

logger = logging.getLogger("align")

STATUS = {"finished": "FINISHED", "failed": "FAILED", "time": "KILLED", "signal": "KILLED"}


@dataclass(frozen=True)
class Synced:
    """The run in the store, and how much of it was missing."""

    uri: str
    run_id: str
    status: str
    points_sent: int


def own_options(root: Path, config: Path | None) -> TrackingOptions:
    """The user's tracking options from `config` or the align.yaml here, never from the run."""
    here = Path.cwd()
    if config is None and (here / FILE_NAME).exists() and here.is_relative_to(root.resolve()):
        raise UsageError(
            f"{here / FILE_NAME} is in the run itself, which does not decide where your data "
            "go. Run the command elsewhere, or name a file by --config."
        )
    return load_settings({}, [], file=config).config.tracking


def sync_runs(root: Path, options: TrackingOptions, *, uri: str = "") -> list[Synced]:
    """Sends the rest of a training run, or of every run of a cache, scores, sweep or rounds.

    One that fails does not keep the others from being sent; the first failure is raised at the end.
    """
    if RunFolder(root).mlflow.exists():
        return [sync_run(root, options, uri=uri)]
    synced: list[Synced] = []
    failed: list[AlignError] = []
    for home in (root, root / SCORES):
        for folder in unsent_runs(home):
            with _kept(failed):
                synced.append(_sync(folder, home, options, uri))
    parent = synced[-1].run_id if synced else ""
    for home in _homes_within(root):
        for folder in (*unsent_runs(home), RunFolder(home)):
            with _kept(failed):
                if (
                    folder.mlflow.exists()
                    and _GROUPS & load_ledger(folder.mlflow).record.tags.keys()
                ):
                    synced.append(_sync(folder, home, options, uri, parent=parent))
    if failed:
        raise failed[0]
    return synced or [sync_run(root, options, uri=uri)]  # which says what is missing


_GROUPS = {GROUP_TAG, ROUNDS_TAG}


def _homes_within(root: Path) -> list[Path]:
    """The folders of the runs of a sweep, and those of the verbs of rounds."""
    found = [*root.glob("*"), *root.glob("round-*/*"), *root.glob("held-out/*")]
    return [path for path in sorted(found) if not (path.is_symlink() or path.parent.is_symlink())]


@contextmanager
def _kept(failed: list[AlignError]) -> Iterator[None]:
    try:
        yield
    except AlignError as error:
        failed.append(error)


def sync_run(root: Path, options: TrackingOptions, *, uri: str = "") -> Synced:
    """Sends the rest of an ended run to the user's store, or all of it to `uri`."""
    return _sync(RunFolder(root), root, options, uri)


def send_earlier(home: Path, options: TrackingOptions) -> str:
    """Sends what earlier runs left; returns the id of the last one if it was cut off.

    A failure is logged, and what was not sent stays.
    """
    run_id = ""
    for folder in unsent_runs(home) if options.mlflow else []:
        try:
            sent = _sync(folder, home, options, "")
        except AlignError as error:
            logger.warning("MLflow does not get the rest of an earlier run: %s", error)
            if isinstance(error, StorageError):
                break  # the store would fail the others too, each after a wait
        else:
            run_id = "" if sent.status == "FINISHED" else sent.run_id
    return run_id


@contextmanager
def recorded_work(
    options: TrackingOptions,
    home: Path,
    stage: str,
    *,
    is_recorded: bool = True,
    is_alone: bool = True,
) -> Iterator[Run]:
    """Records the work on a folder, after sending what earlier runs there left, if it is alone."""
    before = send_earlier(home, options) if is_recorded and is_alone else ""
    with recorded(
        options, home, stage, is_recorded=is_recorded, is_alone=is_alone, goes_on_from=before
    ) as run:
        yield run


def _sync(
    folder: RunFolder, home: Path, options: TrackingOptions, uri: str, *, parent: str = ""
) -> Synced:
    """Sends a run that is in its own folder, or in the outbox of `home`."""
    if folder.private.is_symlink():
        raise UsageError(f"{folder.private} is a link. Name the folder of the run itself.")
    load_ledger(folder.mlflow)
    with owner_lock(folder, "mlflow-sync"):
        ledger = load_ledger(folder.mlflow)
        address = _address(home, ledger.record.uri, options, uri)
        ledger.move_to(address)
        if parent and PARENT_TAG not in ledger.record.tags:
            ledger.add("tags", {PARENT_TAG: parent})
        ending = read_ending(folder)
        if not ledger.record.status:  # no process owns it, and MLflow does not know its end
            status = STATUS[ending.ending] if ending else "KILLED"
            ledger.change(status=status, ended_ms=now_ms())
        points = _deliver(address, folder, ledger)
        if folder.root != home:
            close_record(folder)
        record = ledger.record
    if folder.root != home:
        remove_if_sent(folder)
    return Synced(record.uri, record.run_id, record.status, points)


def _deliver(address: str, folder: RunFolder, ledger: Ledger) -> int:
    try:
        with mlflow_silenced():
            delivery = Delivery(MlflowStore(address), ledger, folder.metrics)
            delivery.deliver()
            return delivery.points
    except Exception as error:  # whatever the libraries of a store raise
        if not isinstance(error, failures()):
            logger.error("%s", redacted(traceback.format_exc()))
        raise StorageError(
            f"MLflow at {address_of(address)} failed: {reason_of(error)}. Start it, or "
            "name another store with --uri, then run the same command again."
        ) from error


def _address(root: Path, named: str, options: TrackingOptions, uri: str) -> str:
    """The store to send to: the one given by hand, else the user's, if the folder names it too."""
    own = store_uri(options)
    if uri or plain_uri(own) == named:
        return uri or own
    raise UsageError(
        f"{root} names the store {named or 'nowhere'}, and your own (tracking.uri of the "
        f"align.yaml here, MLFLOW_TRACKING_URI, or mlflow.db here) is {plain_uri(own)}. A folder "
        f"does not decide where your data go: pass --uri {named or 'ADDRESS'}, with its password "
        "if it has one, to send the run there."
    )
