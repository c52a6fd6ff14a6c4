"""What a store of MLflow holds, asked as tests ask it."""

import warnings
from pathlib import Path

import mlflow

from align.schemas.config import TrackingOptions
from align.stages.tracking.mlflow_sqlite import make_store
from align.stages.tracking.mlflow_tracker import MlflowTracker
from align.stages.tracking.run import recorded
from align.stages.tracking.run_record import RunRecord, Store
from support.tracker_contract import StoredRun


def begun(home, uri, **options):
    """A run of stage 1 on a cache, which ends with the block."""
    tracking = TrackingOptions(uri=uri, **options)
    return recorded(tracking, home, "precompute-ref")


def new_record(folder, uri, **facts):
    """The record of a run that no store has heard of."""
    record = RunRecord.new(folder, "x")
    record.add_stores({"mlflow": Store(MlflowTracker.plain_address(uri))})
    record.change(**facts)
    return record


def id_on_disk(folder):
    """What MLflow calls the run in a folder."""
    return RunRecord.find(folder).sent("mlflow").run_id


def id_of(run):
    """What MLflow calls a run, empty as long as it has not answered."""
    return run.run_ids.get("mlflow", "")


def key_of(run):
    """The tag by which MLflow knows it."""
    return run.origins()["MLflow tag align.run_key"]


def open_store(uri):
    """A client; what SQLAlchemy thinks of MLflow's mappers is not our business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mlflow.MlflowClient(uri)


def make_empty_store(path):
    """Makes the file of a store that holds nothing."""
    make_store(f"sqlite:///{path}", open_store)


def stored(uri, run_id):
    """Every number that MLflow has, as often as it has it."""
    client = open_store(uri)
    keys = client.get_run(run_id).data.metrics
    history = [point for key in keys for point in client.get_metric_history(run_id, key)]
    return sorted((point.key, point.step, point.value) for point in history)


def run_of(uri, run_id):
    """A run as MLflow has it."""
    return open_store(uri).get_run(run_id)


def the_run(client, experiment):
    """The one run of an experiment."""
    found = client.get_experiment_by_name(experiment)
    (only,) = client.search_runs([found.experiment_id])
    return only


def warnings_in(caplog):
    """What the person was warned of."""
    return [record.getMessage() for record in caplog.records if record.name == "align"]


class MlflowStore:
    """A SQLite store, as a tracker's contract tries it."""

    name = "mlflow"
    unkept = ()
    bits = 64
    description = "mlflow.note.content"

    def __init__(self, address):
        self.address = address
        self.path = Path(address.removeprefix("sqlite:///"))

    def stored(self, run_id):
        """The run as the store has it."""
        client = open_store(self.address)
        run = client.get_run(run_id)
        kept = Path(run.info.artifact_uri)
        files = {path.relative_to(kept): path for path in kept.rglob("*") if path.is_file()}
        tags = [tag for data in run.inputs.dataset_inputs for tag in data.tags]
        return StoredRun(
            run.info.status,
            run.data.params,
            run.data.tags,
            sorted(tag.value for tag in tags if tag.key == "align.digest"),
            stored(self.address, run_id),
            {str(name): path.read_text() for name, path in files.items()},
            sorted(
                client.get_logged_model(one.model_id).tags["align.path"]
                for one in run.outputs.model_outputs
            ),
        )

    def run_count(self):
        """How many runs it has."""
        return len(open_store(self.address).search_runs(["0", "1"]))

    def lose(self, run_id):
        """As its owner deletes a run."""
        open_store(self.address).delete_run(run_id)

    def break_down(self):
        """Cannot be read from now on; the file itself stays, for who has it open."""
        self._whole = self.path.read_bytes()
        self.path.write_bytes(b"no database")

    def mend(self):
        """Is as it was."""
        self.path.write_bytes(self._whole)
