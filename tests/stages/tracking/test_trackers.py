"""What every tracker keeps to; and of several trackers none holds another up."""

import subprocess
import sys
import threading

import mlflow
import pytest

from align.pipeline.jobs.tracker_sync import sync_runs
from align.schemas.config import TrackingOptions
from align.schemas.errors import CorruptionError, UsageError
from align.stages.storage.cache import Cache
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking import journaled_run, uploader
from align.stages.tracking.journal import open_journal
from align.stages.tracking.journaled_run import recorded, tagged
from align.stages.tracking.mlflow_tracker import KIND_TAG
from align.stages.tracking.run_record import GROUP_TAG, RunRecord, new_facts, unsent_runs
from align.stages.tracking.tracker import tracker_of
from align.stages.tracking.uploader import Uploader
from support.file_store import FileStore, register
from support.mlflow_runs import MlflowStore, new_record, open_store, warnings_in
from support.patience import PATIENCE, wait_until
from support.refusals import refuses
from support.tensorboard_runs import TensorboardStore
from support.tracked_training import begin, kill, learn
from support.tracker_contract import STEPS, Recorded, ended, killed_after
from support.wandb_runs import WandbStore

BOTH = ["mlflow,files"]
STORES = ("mlflow", "tensorboard", "wandb", "files")

pytestmark = pytest.mark.usefixtures("no_mlflow_settings", "no_wandb_settings")


@pytest.fixture
def mlflow_store(new_store):
    return MlflowStore(new_store())


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder of runs, in which runs are recorded beside MLflow."""
    store = FileStore(tmp_path)
    monkeypatch.setenv("RUNS_FOLDER", store.address)
    register(monkeypatch)
    return store


@pytest.fixture
def run(request, tmp_path, monkeypatch):
    """A run of a tracker whose store holds nothing; its library is imported, for forks."""
    monkeypatch.setattr(uploader, "NUMBERS_PER_CALL", 10)
    if request.param == "mlflow":
        store = MlflowStore(request.getfixturevalue("new_store")())
    elif request.param == "files":
        store = request.getfixturevalue("files")
    else:
        store = {"tensorboard": TensorboardStore, "wandb": WandbStore}[request.param](
            tmp_path / "run"
        )
    with tracker_of(store.name).quiet():
        tracker_of(store.name)(store.address)
    return Recorded(store, tmp_path / "run")


each_tracker = pytest.mark.parametrize("run", STORES, indirect=True)


@each_tracker
def test_a_sender_that_is_killed_after_any_call_loses_nothing_and_doubles_nothing(run):
    run.run.finish("FINISHED")
    tracker = tracker_of(run.store.name)
    assert killed_after(RunRecord, "keep_sent", 4, run.send)
    for call in (
        *(("begin", 1), ("log", 1), ("log", 2), ("label", 1)),
        *(("file", 1), ("file", 2), ("close", 1)),
    ):
        assert killed_after(tracker, *call, run.send), call
    assert ended(run.send) == 0
    run.require_told()
    assert run.send() == 0
    run.require_told()


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
    run.require_told()
    run.folder.sent.write_text("[]")
    run.send()
    run.require_told()
    run.folder.config.write_text("train: {lr: 1}")
    run.run.log_artifact(run.folder.config)
    run.run.set_tags({"align.stage": "another"})
    run.send()
    if not run.store.unkept:
        run.require_told(
            files={"config.yaml": "train: {lr: 1}", "model/inner/card.md": "# a model"}
        )


@each_tracker
def test_a_run_that_the_store_has_lost_is_sent_again_from_the_first_line(run):
    run.run.finish("FINISHED")
    sent = run.send()
    run.store.lose(run.run_id)
    assert run.send() == sent == 2 * STEPS + STEPS / 10
    run.require_told()


@each_tracker
def test_a_store_that_is_down_costs_one_warning_and_gets_everything_once_it_is_back(
    run, monkeypatch, caplog
):
    monkeypatch.setattr(uploader, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(uploader, "SECONDS_PER_TICK", 0.05)
    run.store.break_down()
    run.run.send_to({run.store.name: run.store.address})
    run.run.begin_sending()
    wait_until(lambda: warnings_in(caplog))
    run.learn(range(STEPS, 2 * STEPS))
    assert run.run_id == ""
    run.store.mend()
    wait_until(lambda: run.run_id)
    run.run.finish("FINISHED")
    (warning,) = warnings_in(caplog)
    assert run.store.address in warning
    assert f"align mlflow-sync {run.folder.root}" in warning
    run.require_told()


# Of MLflow's client, in the order in which a run of an experiment without a kind needs them.
CALLS = (
    *(("set_experiment_tag", 1), ("create_run", 1), ("log_batch", 1), ("log_inputs", 1)),
    *(("set_terminated", 1), ("create_logged_model", 1), ("finalize_logged_model", 1)),
    *(("log_outputs", 1), ("log_artifact", 1)),
)


@pytest.mark.parametrize("run", ["mlflow"], indirect=True)
def test_a_kill_after_any_call_to_mlflow_loses_nothing_and_doubles_nothing(run):
    run.run.finish("FINISHED")
    address = run.store.address
    assert ended(lambda: open_store(address).create_experiment("align")) == 0
    assert all(killed_after(mlflow.MlflowClient, *call, run.send) for call in CALLS)
    run.send()
    run.require_told()
    client = open_store(address)
    assert len(client.get_run(run.run_id).outputs.model_outputs) == 1
    assert [model.name for model in client.search_logged_models(["1"])] == ["model"]


def test_an_experiment_is_of_the_kind_that_somebody_gave_it_or_trains_models(
    mlflow_store, tmp_path
):
    client = open_store(mlflow_store.address)
    client.set_experiment_tag(client.create_experiment("chats"), KIND_TAG, "genai_development")
    client.create_experiment("older")
    kinds = {}
    for name in ("chats", "older", "new"):
        run = begin(RunFolder(tmp_path / name), mlflow_store.address, experiment=name)
        run.finish("FINISHED")
        kinds[name] = client.get_experiment_by_name(name).tags[KIND_TAG]
    trains = "custom_model_development"
    assert kinds == {"chats": "genai_development", "older": trains, "new": trains}


def test_every_tracker_gets_all_of_a_run_and_the_run_that_it_belongs_to(
    mlflow_store, files, tmp_path
):
    options = TrackingOptions(uri=mlflow_store.address, trackers=BOTH)
    home = tmp_path / "sweep"
    (home / "_align").mkdir(parents=True)
    with recorded(options, home, "sweep") as parent:
        wait_until(lambda: len(parent.run_ids) == 2)
        with tagged({"align.trial": "one"}, parent):
            run = begin(RunFolder(tmp_path / "run"), mlflow_store.address, trackers=BOTH)
        learn(run, range(20))
        run.log_params({"lr": "0.1"})
        run.finish("FINISHED")
        above = parent.run_ids
    assert not Cache(home).outbox.exists(), "all of it was sent"
    stores = {"mlflow": mlflow_store, "files": files}
    told = {name: store.told(run.run_ids[name]) for name, store in stores.items()}
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
    for status in journaled_run.WAIT_SECONDS:
        monkeypatch.setitem(journaled_run.WAIT_SECONDS, status, 5.0)
    options = TrackingOptions(uri=mlflow_store.address, trackers=BOTH)
    home = tmp_path / "cache"
    (home / "_align").mkdir(parents=True)
    with recorded(options, home, "precompute-ref") as run:
        run.log_metrics({"rows": 16.0}, step=4)
    assert mlflow_store.told(run.run_ids["mlflow"]).numbers == [("rows", 4, 16.0)]
    (warning,) = warnings_in(caplog)
    assert files.address in warning
    (left,) = unsent_runs(home)
    assert not RunRecord.read(left).is_sent("files")
    goes_on.set()
    kill(run)
    synced = {one.tracker: one.run_id for one in sync_runs(home, options)}
    assert files.told(synced["files"]).numbers == [("rows", 4, 16.0)]
    assert not Cache(home).outbox.exists()


def test_neither_a_tracker_nor_a_run_that_fails_keeps_another_from_being_sent(
    mlflow_store, files, tmp_path
):
    for name in ("a", "b"):
        folder = RunFolder(tmp_path / "sweep" / name)
        folder.prepare()
        open_journal(folder.metrics).close()
        record = new_record(folder, mlflow_store.address, tags={GROUP_TAG: "sweep"})
        record.send_to({"files": files.address})
    damaged = RunFolder(tmp_path / "sweep" / "a").run_record
    damaged.write_text("{")
    mlflow_store.break_down()
    with refuses(CorruptionError, damaged):
        sync_runs(tmp_path / "sweep", TrackingOptions(uri=mlflow_store.address))
    sent = RunRecord.read(folder)
    assert (sent.is_sent("files"), sent.is_sent("mlflow")) == (True, False)


def test_of_the_files_that_a_record_names_only_those_of_the_folder_are_sent(files, tmp_path):
    (tmp_path / "mine").write_text("a secret")
    folder = RunFolder(tmp_path / "run")
    folder.prepare()
    open_journal(folder.metrics).close()
    folder.config.write_text("train: {}")
    folder.model.mkdir(exist_ok=True)
    for link in (folder.root / "link", folder.model / "card.md"):
        link.symlink_to(tmp_path / "mine")
    names = ("../mine", str(tmp_path / "mine"), "link", "model", "config.yaml")
    record = RunRecord(folder, new_facts(TrackingOptions(), "train"))
    record.send_to({"files": files.address})
    record.change(status="FINISHED", files=dict.fromkeys(names, 1))
    (synced,) = sync_runs(folder.root, TrackingOptions())
    assert files.told(synced.run_id).files == {"config.yaml": "train: {}"}
    record.change(key="*")
    with refuses(CorruptionError, folder.run_record):
        sync_runs(folder.root, TrackingOptions())


def test_trackers_share_the_seconds_that_a_run_waits_at_its_end(
    mlflow_store, files, tmp_path, monkeypatch
):
    held = [held_up(monkeypatch, name) for name in ("mlflow", "files")]
    monkeypatch.setitem(journaled_run.WAIT_SECONDS, "FINISHED", 0.5)
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


def test_a_run_without_trackers_keeps_its_record_up_to_date(mlflow_store, files, tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, mlflow_store.address, trackers=BOTH).finish("KILLED")
    run = begin(folder, "", keep_through=0, mlflow=False)
    learn(run, range(1, 4))
    run.finish("FINISHED")
    stores = {"mlflow": mlflow_store, "files": files}
    assert {stores[name].told(run_id).status for name, run_id in run.run_ids.items()} == {"KILLED"}
    for synced in sync_runs(folder.root, TrackingOptions(uri=mlflow_store.address)):
        told = stores[synced.tracker].told(synced.run_id)
        assert (told.status, len(told.numbers)) == ("FINISHED", 6)
    fresh = RunFolder(tmp_path / "fresh")
    begin(fresh, "", mlflow=False).finish("FINISHED")
    assert not fresh.run_record.exists()


def test_a_folder_does_not_decide_to_which_tracker_its_data_go(
    mlflow_store, files, tmp_path, monkeypatch
):
    folder = RunFolder(tmp_path / "run")
    begin(folder, mlflow_store.address, trackers=BOTH).finish("FINISHED")
    own = TrackingOptions(uri=mlflow_store.address)
    for mine in (tmp_path / "other", ""):
        monkeypatch.setenv("RUNS_FOLDER", str(mine))
        with refuses(UsageError, files.address, "RUNS_FOLDER", mine):
            sync_runs(folder.root, own)
    assert not (tmp_path / "other").exists()
    monkeypatch.setenv("RUNS_FOLDER", files.address)
    assert [one.numbers_sent for one in sync_runs(folder.root, own)] == [0, 0]


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
