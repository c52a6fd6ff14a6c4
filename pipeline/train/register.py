"""`align register`: adds the trained model of a run to MLflow's registry as a version."""

from __future__ import annotations

from pathlib import Path

from ...schemas.config import TrackingOptions
from ...schemas.errors import UsageError
from ...stages.storage.disk.locks import owner_lock
from ...stages.tracking.mlflow_tracker import MlflowTracker
from ...stages.tracking.run import Sender
from ...stages.tracking.run_record import RunRecord
from ...stages.tracking.tracker import MAIN
from ..jobs.tracker_sync import store_errors, sync_run
from .run_report import require_finished, training_folder


def register(
    root: Path, options: TrackingOptions, *, name: str, alias: str, uri: str = ""
) -> tuple[str, bool]:
    """Uploads missing parts of the run, then registers its model under a name.

    Returns the number of the version and whether it is new.
    """
    folder = training_folder(root)
    require_finished(folder)
    record = RunRecord.find(folder)
    if record is None or MAIN not in record.facts.stores:
        raise UsageError(
            f"{root} was not recorded in {MlflowTracker.title}, which the registry needs. Train "
            "with --mlflow (or --track mlflow)."
        )
    (synced,) = sync_run(folder, root, options, uri=uri, only=MAIN)
    address = uri or MlflowTracker.address_of(options, root)
    with owner_lock(folder.root, "register"), store_errors(Sender(MAIN, address, record)):
        store = MlflowTracker(address)
        return store.register(synced.run_id, folder.loadable, name, alias)
