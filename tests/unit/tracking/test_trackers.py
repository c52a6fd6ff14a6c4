"""What every tracker keeps to; and of several trackers none holds another up."""

import json
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import mlflow
import pytest

from align.pipeline.jobs.tracker_sync import sync_runs
from align.schemas.config import TrackingOptions
from align.schemas.errors import CorruptionError, UsageError
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking import run as tracking
from align.stages.tracking import tracker as trackers
from align.stages.tracking import wandb_tracker
from align.stages.tracking.metrics_log import MetricsLog, read_metrics
from align.stages.tracking.run import Uploader, recorded, tagged
from align.stages.tracking.run_record import GROUP_TAG, RunRecord, Store, unsent_runs
from align.stages.tracking.tracker import quiet, tracker_of
from support import file_tracker
from support.made_caches import in_child
from support.mlflow_runs import MlflowStore, new_record, open_store, warnings_in
from support.patience import PATIENCE, wait_until
from support.refusals import refuses
from support.tensorboard_runs import TensorboardStore
from support.tracked_training import begin, kill, learn
from support.tracker_contract import (
    FILES,
    STEPS,
    Recorded,
    StoredRun,
    killed_after,
    killed_in,
)
from support.wandb_runs import WandbStore

BOTH = ["mlflow,files"]
STORES = ("mlflow", "tensorboard", "wandb", "wandb online", "files")
SEED = 56

pytestmark = pytest.mark.usefixtures("no_mlflow_settings", "no_wandb_settings")


class FileStore:
    """A folder of runs, as `file_tracker` writes it."""

    name = "files"
    unkept = ()
    bits = 64
    description = "note"

    def __init__(self, root):
        self.root = Path(root) / "runs"
        self.address = str(self.root)

    def stored(self, run_id):
        """The run as the store has it."""
        run = self.root / run_id
        labels = _read(run / "labels.json")
        numbers = [number for path in run.glob("metrics/*.json") for number in _read(path)]
        kept = run / "artifacts"
        files = {path.relative_to(kept): path for path in kept.rglob("*") if path.is_file()}
        return StoredRun(
            labels["status"],
            labels["params"],
            labels["tags"] | {"note": labels["note"]},
            labels["data"],
            sorted(map(tuple, numbers)),
            {str(name): path.read_text() for name, path in files.items()},
            sorted(labels["models"]),
        )

    def run_count(self):
        """How many runs it has."""
        return len([*self.root.iterdir()])

    def lose(self, run_id):
        """As if the run had never been."""
        shutil.rmtree(self.root / run_id)

    def break_down(self):
        """Takes no call from now on."""
        self.root.touch()

    def mend(self):
        """Is as it was."""
        self.root.unlink()


def _read(path):
    return json.loads(path.read_text())


@pytest.fixture
def mlflow_store(new_store, tmp_path_factory):
    return MlflowStore(new_store(tmp_path_factory.mktemp("store")))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder of runs; its tracker is added to those that there are."""
    monkeypatch.setitem(sys.modules, f"{trackers.__package__}.file_tracker", file_tracker)
    monkeypatch.setitem(trackers.TRACKERS, "files", "file_tracker")
    store = FileStore(tmp_path)
    monkeypatch.setenv("RUNS_FOLDER", store.address)
    return store


@pytest.fixture
def run(request, tmp_path, monkeypatch):
    """A run of a tracker whose store holds nothing; its library is imported, for forks."""
    monkeypatch.setattr(tracking, "LINES_PER_CALL", 5)
    root = tmp_path / "run"
    if request.param == "mlflow":
        store = request.getfixturevalue("mlflow_store")
    elif request.param == "files":
        store = request.getfixturevalue("files")
    elif request.param == "wandb online":
        store = request.getfixturevalue("wandb_server")
    else:
        request.getfixturevalue("quick_seconds")
        store = {"tensorboard": TensorboardStore, "wandb": WandbStore}[request.param](root)
    with quiet(store.name):
        tracker_of(store.name)(store.address)
    return Recorded(store, root)


each_tracker = pytest.mark.parametrize("run", STORES, indirect=True)
of_mlflow = pytest.mark.parametrize("run", ["mlflow"], indirect=True)


# Of a tracker, in the order in which a run needs them.
CALLS = [("begin", 1), ("log", 1), ("log", 2), ("label", 1), ("file", 1), ("file", 2), ("close", 1)]
SOME = [("begin", 1), ("log", 2), ("close", 1)]


@each_tracker
@pytest.mark.parametrize("calls", [SOME, pytest.param(CALLS, marks=pytest.mark.long)])
def test_a_kill_after_any_call_loses_nothing_and_doubles_nothing(run, calls):
    run.run.finish("FINISHED")
    tracker = tracker_of(run.store.name)
    assert killed_after(RunRecord, "keep_sent", 4, run.send)
    for call, number in calls:
        assert killed_after(tracker, call, number, run.send), (call, number)
    assert in_child(run.send) == 0
    run.require_stored()
    assert run.send() == 0
    run.require_stored()


@each_tracker
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.long)])
def test_a_training_that_is_killed_at_drawn_moments_is_one_run_with_each_number_once(
    run, monkeypatch, kills
):
    """Each start trains again what it did not save, with the same numbers."""
    monkeypatch.setattr(tracking, "SECONDS_PER_TICK", 0.02)
    monkeypatch.setitem(tracking.WAIT_SECONDS, "FINISHED", PATIENCE)
    uri = run.store.address if run.store.name == "mlflow" else ""
    chance, saved = random.Random(SEED), STEPS - 1

    def train():
        one = begin(run.folder, uri, trackers=[run.store.name], keep_through=saved)
        learn(one, range(saved + 1, 2 * STEPS), pause=0.01)
        one.finish("FINISHED")

    for _ in range(kills):
        killed_in(chance.uniform(0.1, 1.0), train)
        last = max(line.step for line in read_metrics(run.folder.metrics))
        saved = max(saved, last - last % 7)
    assert in_child(train) == 0
    run.require_stored()
    assert run.store.run_count() == 1


@each_tracker
def test_what_was_refused_or_forgotten_is_sent_again_and_is_there_once(run, monkeypatch):
    def refuse(*_):
        raise ConnectionError

    run.run.finish("FINISHED")
    with monkeypatch.context() as patch:
        patch.setattr(tracker_of(run.store.name), "log", refuse)
        with pytest.raises(ConnectionError):
            run.send()
    run.send()
    run.require_stored()
    run.folder.sent.write_text("[]")
    run.send()
    run.require_stored()
    run.folder.config.write_text("train: {lr: 1}")
    run.run.log_artifact(run.folder.config)
    run.run.set_tags({"align.stage": "another"})
    run.send()
    run.require_stored(files=FILES | {"config.yaml": "train: {lr: 1}"})


@pytest.mark.parametrize("run", [one for one in STORES if one != "wandb online"], indirect=True)
def test_a_run_that_the_store_has_lost_is_sent_again_from_the_first_line(run):
    run.run.finish("FINISHED")
    sent = run.send()
    run.store.lose(run.run_id)
    assert run.send() == sent == 2 * STEPS + STEPS / 10
    run.require_stored()


@each_tracker
def test_a_store_that_is_down_costs_one_warning_and_gets_everything_once_it_is_back(
    run, monkeypatch, caplog
):
    monkeypatch.setattr(tracking, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(tracking, "SECONDS_PER_TICK", 0.05)
    monkeypatch.setattr(wandb_tracker, "INIT_SECONDS", 1.0)
    run.store.break_down()
    run.run.send_to({run.store.name: run.store.address}, TrackingOptions())
    run.run.begin_sending()
    wait_until(lambda: warnings_in(caplog))
    run.learn(range(STEPS, 2 * STEPS))
    assert run.run_id == ""
    monkeypatch.setattr(wandb_tracker, "INIT_SECONDS", PATIENCE)
    run.store.mend()
    wait_until(lambda: run.run_id)
    run.run.finish("FINISHED")
    (warning,) = warnings_in(caplog)
    assert run.store.address in warning
    assert f"align mlflow-sync {run.folder.root}" in warning
    run.require_stored()


# Of MLflow's client, in the order in which a run needs them.
CLIENT_CALLS = {
    "create_run": 1,
    "log_batch": 1,
    "log_inputs": 1,
    "set_terminated": 1,
    "create_logged_model": 1,
    "finalize_logged_model": 1,
    "log_outputs": 1,
    "log_artifact": 3,
    "log_dict": 1,
    "set_tag": 1,
}


@of_mlflow
@pytest.mark.parametrize(
    "calls",
    [
        ["create_run", "log_outputs", "set_tag"],
        pytest.param([*CLIENT_CALLS], marks=pytest.mark.long),
    ],
)
def test_a_kill_after_any_call_to_mlflow_loses_nothing_and_doubles_nothing(run, calls):
    table = run.folder.evaluation(2)
    table.parent.mkdir()
    table.write_text("row_id,tokens,logp,completion\n007,3,-1.5,1\n008,4,nan,=a\n")
    run.run.log_artifact(table)
    run.run.finish("FINISHED")
    for call in calls:
        assert killed_after(mlflow.MlflowClient, call, CLIENT_CALLS[call], run.send), call
    run.send()
    client = open_store(run.store.address)
    drawn = {
        "columns": ["row_id", "tokens", "logp", "completion"],
        "data": [["007", 3.0, -1.5, "1"], ["008", 4.0, None, "=a"]],
    }
    told = run.store.stored(run.run_id)
    assert json.loads(told.files["evaluations/step-00000002.json"]) == drawn
    shown = json.loads(told.tags["mlflow.loggedArtifacts"])
    assert shown == [{"path": "evaluations/step-00000002.json", "type": "table"}]
    run.require_stored(files=told.files)
    assert len(client.get_run(run.run_id).outputs.model_outputs) == 1
    assert [model.name for model in client.search_logged_models(["1"])] == ["model"]


@of_mlflow
def test_a_table_that_cannot_be_drawn_is_sent_as_a_file(run, caplog):
    table = run.folder.evaluation(2)
    table.parent.mkdir()
    table.write_text("row_id,logp\n007,x\n")
    run.run.log_artifact(table)
    run.run.finish("FINISHED")
    run.send()
    assert table.name in "".join(warnings_in(caplog))
    run.require_stored(files=FILES | {f"{table.parent.name}/{table.name}": table.read_text()})


def test_every_tracker_gets_all_of_a_run_and_the_run_that_it_belongs_to(
    mlflow_store, files, tmp_path
):
    options = TrackingOptions(uri=mlflow_store.address, trackers=BOTH)
    home = tmp_path / "sweep"
    (home / "_align").mkdir(parents=True)
    with recorded(options, home, "sweep") as parent:
        with tagged({"align.trial": "one"}, parent):
            run = begin(RunFolder(tmp_path / "run"), mlflow_store.address, trackers=BOTH)
        learn(run, range(20))
        run.log_params({"lr": "0.1"})
        wait_until(lambda: len(parent.run_ids) == 2)
        run.finish("FINISHED")
        above = parent.run_ids
    assert not unsent_runs(home), "all of it was sent"
    stores = {"mlflow": mlflow_store, "files": files}
    told = {name: store.stored(run.run_ids[name]) for name, store in stores.items()}
    for one in told.values():
        assert (one.status, one.params) == ("FINISHED", {"lr": "0.1"})
        assert one.tags["align.trial"] == "one"
        assert one.tags["align.parent"] == above["files"]
        assert one.numbers == told["mlflow"].numbers
    assert len(told["files"].numbers) == 20 * 2 + 2
    assert told["mlflow"].tags["mlflow.parentRunId"] == above["mlflow"]


def held_up(monkeypatch, name):
    """Lets no run be begun in these stores; the event ends that."""
    goes_on, tracker = threading.Event(), tracker_of(name)
    begin_now = tracker.begin

    def begin_late(*given):
        assert goes_on.wait(PATIENCE)
        return begin_now(*given)

    monkeypatch.setattr(tracker, "begin", begin_late)
    return goes_on


def test_a_tracker_that_hangs_holds_no_other_up_and_is_told_later(
    mlflow_store, files, tmp_path, monkeypatch, caplog
):
    goes_on = held_up(monkeypatch, "files")
    for status in tracking.WAIT_SECONDS:
        monkeypatch.setitem(tracking.WAIT_SECONDS, status, 2.0)
    options = TrackingOptions(uri=mlflow_store.address, trackers=BOTH)
    home = tmp_path / "cache"
    (home / "_align").mkdir(parents=True)
    with recorded(options, home, "precompute-ref") as run:
        run.log_metrics({"rows": 16.0}, step=4)
        wait_until(lambda: "mlflow" in run.run_ids)
    assert mlflow_store.stored(run.run_ids["mlflow"]).numbers == [("rows", 4, 16.0)]
    (warning,) = warnings_in(caplog)
    assert files.address in warning
    (left,) = unsent_runs(home)
    assert not RunRecord.find(left).is_sent("files")
    goes_on.set()
    kill(run)
    assert not RunRecord.find(left).sent("files").run_id, "nobody locks the run by now"
    synced = {one.tracker: one.run_id for one in sync_runs(home, options)}
    assert files.stored(synced["files"]).numbers == [("rows", 4, 16.0)]
    assert not unsent_runs(home)


def test_trackers_share_the_seconds_that_a_run_waits_at_its_end(
    mlflow_store, files, tmp_path, monkeypatch
):
    held = [held_up(monkeypatch, name) for name in ("mlflow", "files")]
    monkeypatch.setitem(tracking.WAIT_SECONDS, "FINISHED", 0.5)
    waited, join = [], Uploader.join

    def watched(one, seconds):
        waited.append(seconds)
        join(one, seconds)

    monkeypatch.setattr(Uploader, "join", watched)
    run = begin(RunFolder(tmp_path / "run"), mlflow_store.address, trackers=BOTH)
    run.finish("FINISHED")
    for goes_on in held:
        goes_on.set()
    kill(run)
    first, second = waited
    assert 0 < first <= 0.5
    assert second == 0, "the first took all of it"


def test_neither_a_tracker_nor_a_run_that_fails_keeps_another_from_being_sent(
    mlflow_store, files, tmp_path
):
    """The store of the first tracker is down, the second is none here, as of another install."""
    for name in ("a", "b"):
        folder = RunFolder(tmp_path / "sweep" / name)
        folder.prepare()
        MetricsLog(folder.metrics).close()
        record = new_record(folder, mlflow_store.address, tags={GROUP_TAG: "sweep"})
        record.add_stores({"elsewhere": Store("there"), "files": Store(files.address)})
    damaged = RunFolder(tmp_path / "sweep" / "a").run_record
    damaged.write_text("{")
    mlflow_store.break_down()
    own = TrackingOptions(uri=mlflow_store.address)
    with refuses(CorruptionError, damaged):
        sync_runs(tmp_path / "sweep", own)
    sent = RunRecord.find(folder)
    assert (sent.is_sent("files"), sent.is_sent("mlflow")) == (True, False)
    mlflow_store.mend()
    with refuses(UsageError, "elsewhere", "mlflow"):
        sync_runs(folder.root, own)
    assert RunRecord.find(folder).is_sent("mlflow")


LIGHT = """
import sys
from align.schemas.config import TrackingOptions
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking.run import open_training_run
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


def test_a_folder_with_the_name_of_a_library_is_not_that_library(tmp_path, monkeypatch):
    (tmp_path / tracker_of("wandb").library).mkdir()
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "wandb", raising=False)
        patch.setattr(sys, "path", [str(tmp_path)])
        with refuses(UsageError, "tracking.trackers", "pip install"):
            trackers.require_trackers(TrackingOptions(trackers=["wandb"]))


def test_no_library_of_a_tracker_is_imported_before_the_first_step(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "{}"
