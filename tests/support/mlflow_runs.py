"""What a store of MLflow holds, asked as tests ask it."""

import warnings

import mlflow

from align.schemas.config import TrackingOptions
from align.stages.tracking.journaled_run import recorded


def begun(home, uri, **options):
    """A run of stage 1 on a cache, which ends with the block."""
    tracking = TrackingOptions(uri=uri, **options)
    return recorded(tracking, home, "precompute-ref", is_recorded=True)


def open_store(uri):
    """A client; what SQLAlchemy thinks of MLflow's mappers is not our business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mlflow.MlflowClient(uri)


def the_run(client, experiment):
    """The one run of an experiment."""
    found = client.get_experiment_by_name(experiment)
    (only,) = client.search_runs([found.experiment_id])
    return only


def warnings_in(caplog):
    """What the person was warned of."""
    return [record.getMessage() for record in caplog.records if record.name == "align"]
