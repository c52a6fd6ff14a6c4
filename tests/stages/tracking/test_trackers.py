"""Trackers keep to what a run relies on, and of several none holds another up."""

import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from align.pipeline.jobs.tracker_sync import sync_runs
from align.schemas.config import TrackingOptions
from align.schemas.errors import UsageError
from align.stages.storage.cache import Cache
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking import journaled_run
from align.stages.tracking.delivery import Sender
from align.stages.tracking.journaled_run import recorded, tagged
from align.stages.tracking.mlflow_tracker import KIND_TAG
from align.stages.tracking.outbox import unsent_runs
from align.stages.tracking.tracker import kind_of
from support.file_store import FileStore, register
from support.mlflow_runs import MlflowStore, open_store, warnings_in
from support.patience import PATIENCE
from support.refusals import refuses
from support.tensorboard_runs import TensorboardStore
from support.tracked_training import begin, learn
from support.tracker_contract import Deadly, Recorded, ended, require_tracker_contract

BOTH = ["mlflow,files"]

pytestmark = pytest.mark.usefixtures("no_mlflow_settings")


def test_mlflow_keeps_to_the_contract(new_store, tmp_path):
    require_tracker_contract(kind_of("mlflow"), lambda: MlflowStore(new_store()), tmp_path)


def test_tensorboard_keeps_to_the_contract(here, tmp_path):
    require_tracker_contract(kind_of("tensorboard"), TensorboardStore.new, tmp_path)


# Of MLflow's client, in the order in which a run of an experiment without a kind needs them.
CALLS = (
    *(("set_experiment_tag", 1), ("create_run", 1), ("log_batch", 1), ("log_inputs", 1)),
    *(("set_terminated", 1), ("log_artifact", 1)),
    *(("create_logged_model", 1), ("finalize_logged_model", 1), ("log_outputs", 1)),
)


def test_a_kill_after_any_call_to_mlflow_loses_nothing_and_doubles_nothing(mlflow, tmp_path):
    kind = kind_of("mlflow")
    run = Recorded(kind, mlflow.address, tmp_path / "run")
    run.end()
    with kind.quiet():
        kind.load(mlflow.address)  # a fork has it then
    assert ended(lambda: open_store(mlflow.address).create_experiment("align")) == 0

    def deliver(call, number):
        with kind.quiet():
            tracker = kind.open(mlflow.address)
            tracker.client = Deadly(tracker.client, call, number)
            run.heard_by(tracker).deliver()

    assert [ended(partial(deliver, *call)) for call in CALLS] == [-signal.SIGKILL] * len(CALLS)
    run.deliver()
    run.require_told(mlflow)
    client = open_store(mlflow.address)
    told = client.get_run(run.ledger.record.run_id)
    assert len(told.outputs.model_outputs) == 1
    assert [model.name for model in client.search_logged_models(["1"])] == ["model"]


def test_an_experiment_is_of_the_kind_that_somebody_gave_it_or_trains_models(mlflow, tmp_path):
    client = open_store(mlflow.address)
    client.set_experiment_tag(client.create_experiment("chats"), KIND_TAG, "genai_development")
    client.create_experiment("older")
    kinds = {}
    for name in ("chats", "older", "new"):
        begin(RunFolder(tmp_path / name), mlflow.address, experiment=name).finish("FINISHED")
        kinds[name] = client.get_experiment_by_name(name).tags[KIND_TAG]
    trains = "custom_model_development"
    assert kinds == {"chats": "genai_development", "older": trains, "new": trains}


@pytest.fixture
def mlflow(new_store):
    return MlflowStore(new_store())


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder of runs, in which runs are recorded beside MLflow."""
    store = FileStore(tmp_path / "runs")
    monkeypatch.setenv("RUNS_FOLDER", store.address)
    register(monkeypatch)
    return store


def test_every_tracker_is_told_all_of_a_run_and_of_the_run_that_it_belongs_to(
    mlflow, files, tmp_path
):
    options = TrackingOptions(uri=mlflow.address, trackers=BOTH)
    home = tmp_path / "sweep"
    home.mkdir()
    with recorded(options, home, "sweep") as parent:
        assert parent.run_ids.keys() == {"mlflow", "files"}
        with tagged({"align.trial": "one"}, parent):
            run = begin(RunFolder(tmp_path / "run"), mlflow.address, trackers=BOTH)
        learn(run, range(20))
        run.log_params({"lr": "0.1"})
        run.finish("FINISHED")
    assert not list(Cache(home).private.iterdir()), "all of it was sent"
    above = parent.run_ids
    stores = {"mlflow": mlflow, "files": files}
    told = {name: store.told(run.run_ids[name]) for name, store in stores.items()}
    for one in told.values():
        assert (one.status, one.params) == ("FINISHED", {"lr": "0.1"})
        assert one.tags["align.trial"] == "one"
        assert one.numbers == told["mlflow"].numbers
    assert len(told["files"].numbers) == 20 * 2 + 2
    assert told["mlflow"].tags["mlflow.parentRunId"] == above["mlflow"]
    assert told["files"].tags["align.parent"] == above["files"]
    assert "align.parent" not in told["mlflow"].tags


def held_up(monkeypatch, kind):
    """Lets no run be begun in these stores; the event ends that."""
    goes_on = threading.Event()

    def begin_late(tracker, record):
        assert goes_on.wait(PATIENCE)
        return begin_now(tracker, record)

    begin_now = kind.open.begin
    monkeypatch.setattr(kind.open, "begin", begin_late)
    return goes_on


def test_a_tracker_that_hangs_holds_no_other_up_and_is_told_later(
    mlflow, files, tmp_path, monkeypatch, caplog
):
    goes_on = held_up(monkeypatch, kind_of("files"))
    for status in journaled_run.PATIENCE_SECONDS:
        monkeypatch.setitem(journaled_run.PATIENCE_SECONDS, status, 3.0)
    options = TrackingOptions(uri=mlflow.address, trackers=BOTH)
    home = tmp_path / "cache"
    (home / "_align").mkdir(parents=True)
    with recorded(options, home, "precompute-ref") as run:
        run.log_metrics({"rows": 16.0}, step=4)
    (sender,) = [one for one in run._senders._all if not one.is_complete]
    assert mlflow.told(run.run_ids["mlflow"]).numbers == [("rows", 4, 16.0)]
    (warning,) = warnings_in(caplog)
    assert files.address in warning
    (left,) = unsent_runs(home)
    assert left.ledgers() == [left.private / "trackers" / "files.json"]
    goes_on.set()
    sender._thread.join(PATIENCE)
    (synced,) = sync_runs(home, options)
    assert files.told(synced.run_id).numbers == [("rows", 4, 16.0)]
    assert not Cache(home).outbox.exists()


def test_trackers_share_the_seconds_that_a_run_waits_at_its_end(
    mlflow, files, tmp_path, monkeypatch
):
    held = [held_up(monkeypatch, kind_of(name)) for name in ("mlflow", "files")]
    monkeypatch.setitem(journaled_run.PATIENCE_SECONDS, "FINISHED", 0.5)
    waited, join = [], Sender.join

    def watched(sender, patience):
        waited.append(patience)
        join(sender, patience)

    monkeypatch.setattr(Sender, "join", watched)
    run = begin(RunFolder(tmp_path / "run"), mlflow.address, trackers=BOTH)
    run.finish("FINISHED")
    for goes_on in held:
        goes_on.set()
    for sender in run._senders._all:
        sender._thread.join(PATIENCE)
    first, second = waited
    assert 0 < first <= 0.5
    assert second == 0, "the first took all of it"


def test_a_run_without_trackers_keeps_the_ledgers_that_it_has(mlflow, files, tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, mlflow.address, trackers=BOTH).finish("KILLED")
    assert folder.ledgers() == [folder.mlflow, folder.private / "trackers" / "files.json"]
    run = begin(folder, "", keep_through=0, mlflow=False)
    learn(run, range(1, 4))
    run.finish("FINISHED")
    stores = {"mlflow": mlflow, "files": files}
    assert {stores[name].told(run_id).status for name, run_id in run.run_ids.items()} == {"KILLED"}
    for synced in sync_runs(folder.root, TrackingOptions(uri=mlflow.address)):
        told = stores[synced.tracker].told(synced.run_id)
        assert (told.status, len(told.numbers)) == ("FINISHED", 6)
    fresh = RunFolder(tmp_path / "fresh")
    begin(fresh, "", mlflow=False).finish("FINISHED")
    assert not fresh.ledgers()


def test_a_folder_does_not_decide_to_which_tracker_its_data_go(
    mlflow, files, tmp_path, monkeypatch
):
    folder = RunFolder(tmp_path / "run")
    begin(folder, mlflow.address, trackers=BOTH).finish("FINISHED")
    own = TrackingOptions(uri=mlflow.address)
    for mine in (tmp_path / "other", ""):
        monkeypatch.setenv("RUNS_FOLDER", str(mine))
        with refuses(UsageError, files.address, "RUNS_FOLDER", mine):
            sync_runs(folder.root, own)
    assert not (tmp_path / "other").exists()
    monkeypatch.setenv("RUNS_FOLDER", files.address)
    assert [one.points_sent for one in sync_runs(folder.root, own)] == [0, 0]


LIGHT = """
import sys
from align.schemas.config import TrackingOptions
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking.journaled_run import open_training_run
from pathlib import Path

folder = RunFolder(Path("run"))
folder.prepare()
run = open_training_run(TrackingOptions(), folder, name="train", tags={}, keep_through=-1)
run.log_params({"lr": "0.1"})
run.log_metrics({"eval/loss": 0.5}, step=0)
print(*sorted({"mlflow", "sqlalchemy"} & {*sys.modules}), run.run_ids)
sys.stdout.flush()
import os
os._exit(0)
"""


def test_no_library_of_a_tracker_is_imported_before_the_first_step(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "{}"
