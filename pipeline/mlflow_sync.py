"""Sends MLflow what it missed of a run; sending it twice changes nothing.

The folder may be somebody else's. What it names is not believed: the address is the user's own or
one that was given by hand, and no file is sent but those that lie in the folder themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..schemas.config import TrackingOptions
from ..schemas.errors import StorageError, UsageError
from ..stages.storage.cache_folder import CacheFolder
from ..stages.storage.locks import owner_lock
from ..stages.storage.run_folder import RunFolder, read_ending
from ..stages.tracking.delivery import Delivery
from ..stages.tracking.mlflow_client import MlflowStore
from ..stages.tracking.mlflow_run import store_uri
from ..stages.tracking.mlflow_silence import mlflow_silenced
from ..stages.tracking.outbox import Note, address_of, failures, load_ledger, plain_uri, reason_of
from .settings import FILE_NAME, load_settings

T = TypeVar("T")


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
            f"{here / FILE_NAME} lies in the run itself, which does not decide where your data "
            "go. Run the command elsewhere, or name a file by --config."
        )
    return load_settings({}, [], file=config).config.tracking


def sync_run(root: Path, options: TrackingOptions, *, uri: str = "") -> Synced:
    """Sends the rest of an ended run to the user's store, or all of it to `uri`."""
    folder = RunFolder(root)
    if folder.private.is_symlink():
        raise UsageError(f"{folder.private} is a link. Name the folder of the run itself.")
    if not folder.mlflow.exists() and CacheFolder(root).mlflow.exists():
        return _settle_cache(CacheFolder(root), options, uri)
    load_ledger(folder.mlflow)
    with owner_lock(folder, "mlflow-sync"):
        ledger = load_ledger(folder.mlflow)
        address = _address(root, ledger.record.uri, options, uri)
        ledger.move_to(address)
        ending = read_ending(folder)
        if not ledger.record.status:  # nobody is at work here, and MLflow does not know the end
            status = STATUS[ending.ending] if ending else "KILLED"
            ledger.change(status=status, ended_ms=time.time_ns() // 1_000_000)

        def deliver() -> int:
            delivery = Delivery(MlflowStore(address), ledger, folder.metrics)
            delivery.deliver()
            return delivery.points

        points = _asked(address, deliver)
        record = ledger.record
        return Synced(record.uri, record.run_id, record.status, points)


def _settle_cache(cache: CacheFolder, options: TrackingOptions, uri: str) -> Synced:
    """Sends the end of a stage 1 run that was killed, or whose end the store missed."""
    with owner_lock(cache, "mlflow-sync"):
        note = Note(cache.mlflow)
        run = note.read()
        if run is None:
            raise UsageError(f"{cache.root}: MLflow knows by now how its last run ended.")
        address = _address(cache.root, run.uri, options, uri)
        run_id = _asked(address, lambda: note.settle(MlflowStore(address), address))
        return Synced(plain_uri(address), run_id, run.status or "KILLED", 0)


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


def _asked(address: str, action: Callable[[], T]) -> T:
    try:
        with mlflow_silenced():
            return action()
    except failures() as error:
        raise StorageError(
            f"MLflow at {address_of(address)} failed: {reason_of(error)}. Start it, or "
            "name another store with --uri, then run the same command again."
        ) from error
