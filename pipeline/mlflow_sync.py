"""Tells MLflow what it missed of a training run; telling it twice changes nothing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..schemas.errors import StorageError
from ..stages.storage.ending import read_ending
from ..stages.storage.locks import owner_lock
from ..stages.storage.run_folder import RunFolder
from ..stages.tracking.delivery import Delivery
from ..stages.tracking.guard import failures, reason_of, without_password
from ..stages.tracking.ledger import load_ledger, plain_uri
from ..stages.tracking.mlflow_store import MlflowStore

if TYPE_CHECKING:
    from pathlib import Path

    from ..stages.tracking.ledger import Ledger


STATUS = {"finished": "FINISHED", "failed": "FAILED", "time": "KILLED", "signal": "KILLED"}


@dataclass(frozen=True)
class Synced:
    """What is in the store now, and how much of it was missing."""

    uri: str
    run_id: str
    status: str
    points_sent: int


def sync_run(root: Path, *, uri: str = "") -> Synced:
    """Sends the rest of a run that is over to its store, or all of it to another one."""
    folder = RunFolder(root)
    load_ledger(folder.mlflow)
    with owner_lock(folder, "mlflow-sync"):
        ledger = load_ledger(folder.mlflow)
        address = uri or _address_of(ledger)
        ledger.move_to(address)
        ending = read_ending(folder)
        if not ledger.record.status:  # nobody is at work here, and MLflow was not told the end
            status = STATUS[ending.ending] if ending else "KILLED"
            ledger.change(status=status, ended_ms=time.time_ns() // 1_000_000)
        try:
            delivery = Delivery(MlflowStore(address), ledger, folder.metrics)
            delivery.deliver()
        except failures() as error:
            raise StorageError(
                f"MLflow at {without_password(address)} failed: {reason_of(error)}. Start it, or "
                "name another store with --uri, then run the same command again."
            ) from error
        record = ledger.record
        return Synced(record.uri, record.run_id, record.status, delivery.points)


def _address_of(ledger: Ledger) -> str:
    """The ledger keeps no password; the environment may."""
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    return given if given and plain_uri(given) == ledger.record.uri else ledger.record.uri
