"""`align register`: the trained model of a run becomes a version in MLflow's registry."""

from __future__ import annotations

from pathlib import Path

from ...schemas.config import TrackingOptions
from ...schemas.errors import UsageError
from ...stages.storage.disk.locks import owner_lock
from ...stages.tracking.delivery import is_own
from ...stages.tracking.mlflow_registry import ModelVersion, register_version
from ...stages.tracking.mlflow_tracker import MlflowTracker
from ...stages.tracking.tracker import MAIN, kind_of
from ..jobs.tracker_sync import asked_store, sync_ledger
from .run_report import require_finished, training_folder


def register(
    root: Path, options: TrackingOptions, *, name: str, alias: str, uri: str = ""
) -> ModelVersion:
    """Sends what the store lacks of the run, then registers its model under a name.

    The folder may come from someone else: as for `mlflow-sync`, it does not choose the store.
    """
    folder, kind = training_folder(root), kind_of(MAIN)
    require_finished(folder)
    model = folder.loadable
    if not is_own(root, model.name):
        raise UsageError(f"{model} is a link, or has one in it. Put the files in its place.")
    if not folder.mlflow.exists():
        raise UsageError(
            f"{root} was not recorded in {kind.title}, whose registry names the run of a model. "
            "Train with --mlflow (or --track mlflow)."
        )
    synced = sync_ledger(kind, folder, root, options, uri=uri)
    address = uri or kind.address(options, root)
    with owner_lock(folder.root, "register"), asked_store(kind, address):
        client = MlflowTracker(address).client
        return register_version(client, synced.run_id, model, name=name, alias=alias)
