"""Offline runs of wandb hold the metrics once each, whatever became of who wrote them."""

import subprocess
import sys

import psutil
import pytest
import wandb

from align.pipeline.jobs.tracker_sync import sync_runs
from align.schemas.config import TrackingOptions
from align.schemas.errors import UsageError
from align.stages.tracking import run as tracking
from align.stages.tracking import wandb_tracker
from align.stages.tracking.run import recorded, tagged
from align.stages.tracking.run_record import GROUP_TAG, RunRecord
from align.stages.tracking.wandb_tracker import FOLDER
from support.mlflow_runs import warnings_in
from support.patience import PATIENCE, wait_until
from support.refusals import refuses
from support.tracked_training import (
    begin,
    kill,
    learn,
    run_folder,
    sync_run,
    timed,
    trained_again,
)
from support.wandb_runs import config, numbers, records, rows, run_file, tear_down

ALONE = ["wandb"]
QUIET = wandb.Settings(silent=True, console="off")
HELD_UP = 120  # seconds: a server that hangs would hold the exit for longer

pytestmark = pytest.mark.usefixtures("no_wandb_settings")


@pytest.fixture
def killed(tmp_path):
    """A run that sent thirty steps, and then no more."""
    folder = run_folder(tmp_path)
    run = begin(folder, "", trackers=ALONE)
    run.log_params({"lr": "1e-06", "seed": "7", "model": "a|b", "lora": "False", "date": "0123"})
    learn(run, range(1, 31))
    kill(run)
    tear_down()
    return folder, run


def the_file(folder):
    """That of the one run that is there."""
    (found,) = (folder.root / FOLDER).glob("*/*.wandb")
    return run_file(folder.root / FOLDER, found.stem.removeprefix("run-"))


def test_a_resumed_run_is_one_with_each_number_at_its_step_and_time(killed):
    """Some of its steps were trained again, with other numbers."""
    folder, first = killed
    second = trained_again(folder, "", range(21, 26), trackers=ALONE)
    assert second.run_ids == first.run_ids
    file = the_file(folder)
    assert numbers(file) == timed(folder.root)
    assert ("loss", 25, 125.0) in [one[:3] for one in numbers(file)]
    told = config(file)
    plain = {name: told[name] for name in ("lr", "seed", "model", "lora", "date")}
    assert plain == {"lr": 1e-6, "seed": 7, "model": "a|b", "lora": False, "date": "0123"}
    assert told["align"]["status"] == "FINISHED"
    (exited,) = [record.exit for record in records(file) if record.HasField("exit")]
    assert exited.exit_code == 0
    metrics = [record.metric for record in records(file) if record.HasField("metric")]
    assert {(one.glob_name, one.step_metric) for one in metrics} == {("*", "step")}
    steps = [row["_step"] for row in rows(file)]
    assert steps == sorted({*steps}), "a server drops a row whose step does not rise"
    synced = sync_run(folder.root, TrackingOptions())
    assert (synced.run_id, synced.numbers_sent) == (second.run_ids["wandb"], 0)
    assert the_file(folder) == file


def test_a_service_that_is_killed_costs_a_warning_and_no_number(tmp_path, monkeypatch, caplog):
    """Nor does the step that is trained wait for it: it enters no module of wandb."""
    monkeypatch.setattr(tracking, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(tracking, "SECONDS_PER_TICK", 0.05)
    folder = run_folder(tmp_path)
    run = begin(folder, "", trackers=ALONE)
    wait_until(lambda: run.run_ids)
    entered = learn(run, range(1, 20), at=(10, kill_service), pause=0.01)
    assert "align.stages.tracking.metrics_log.MetricsLog.append" in entered
    assert not any(name.startswith(("wandb", wandb_tracker.__name__)) for name in entered)
    run.finish("FINISHED")
    assert numbers(the_file(folder)) == timed(folder.root)
    (warning,) = warnings_in(caplog)
    assert str(folder.root / FOLDER) in warning


def kill_service():
    """As the system does when memory runs out."""
    (service,) = [
        one for one in psutil.Process().children(recursive=True) if one.name() == "wandb-core"
    ]
    service.kill()


def test_neither_a_key_nor_the_machine_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    folder = run_folder(tmp_path)
    run = begin(folder, "", trackers=ALONE, experiment="prefs/of: mine")
    run.finish("FINISHED")
    assert not warnings_in(caplog)
    file = the_file(folder)
    written = [path for path in (folder.root / FOLDER).rglob("*") if path.is_file()]
    assert not [path for path in written if b"0123456789" * 4 in path.read_bytes()]
    assert not [path for path in written if path.parent.name == "files"], "nothing to upload"
    told = [record.run for record in records(file) if record.HasField("run")]
    assert {(one.host, one.project) for one in told} == {("-", "prefs-of- mine")}
    assert not any(record.HasField("environment") for record in records(file))


def test_runs_of_a_sweep_are_a_group_in_the_folder_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "all"))
    options = TrackingOptions(trackers=ALONE)
    home = tmp_path / "sweep"
    (home / "_align").mkdir(parents=True)
    with recorded(options, home, "sweep") as parent:
        with tagged({GROUP_TAG: str(home)}, parent):
            run = begin(run_folder(tmp_path), "", trackers=ALONE)
        run.finish("FINISHED")
        wait_until(lambda: parent.run_ids)
        above = parent.run_ids["wandb"]
    file = run_file(tmp_path / "all" / FOLDER, run.run_ids["wandb"])
    told = [record.run for record in records(file) if record.HasField("run")]
    assert {(one.run_group, one.display_name) for one in told} == {("sweep", "train")}
    assert config(file)["align"]["tags"]["align.parent"] == above
    run_file(tmp_path / "all" / FOLDER, above)
    assert not (tmp_path / "run" / FOLDER).exists()


def test_wandb_that_is_disabled_is_refused_as_a_tracker(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with refuses(UsageError, "WANDB_MODE"):
        begin(run_folder(tmp_path), "", trackers=ALONE)


def test_online_a_killed_run_is_resumed_as_the_same_with_each_line_once(tmp_path, wandb_server):
    folder = run_folder(tmp_path)
    first = begin(folder, "", trackers=ALONE)
    first.describe("What it is.")
    learn(first, range(1, 31))
    before = timed(folder.root)
    kill(first)
    run_id = first.run_ids["wandb"]
    tear_down()  # by itself wandb sends every 15 seconds
    assert len(wandb_server.rows[run_id]) == 33
    assert wandb_server.exit_codes.pop(run_id) == 1
    assert wandb_server.runs[run_id]["notes"] == "What it is."
    wandb_server.runs[run_id]["notes"] = "What I made of it."
    folder.sent.unlink()  # nobody noted how far it was
    second = trained_again(folder, "", range(21, 36), trackers=ALONE)
    wait_until(lambda: run_id in wandb_server.exit_codes)
    assert second.run_ids == {"wandb": run_id}
    new = [one for one in timed(folder.root) if one[1] > 30]
    assert wandb_server.numbers(run_id) == sorted([*before, *new])
    assert wandb_server.runs[run_id]["notes"] == "What I made of it."


def test_a_server_that_stops_answering_gets_the_rest_later(
    tmp_path, wandb_server, monkeypatch, caplog
):
    monkeypatch.setattr(wandb_tracker, "FINISH_SECONDS", 1.0)
    folder = run_folder(tmp_path)
    run = begin(folder, "", trackers=ALONE)
    learn(run, range(1, 11))
    run.finish("KILLED")
    run = begin(folder, "", trackers=ALONE, keep_through=10)
    wait_until(lambda: wandb_tracker.OPEN_RUNS)
    wandb_server.hang()
    learn(run, range(11, 21))
    run.finish("FINISHED")
    (warning,) = warnings_in(caplog)
    assert f"align mlflow-sync {folder.root}" in warning
    record = RunRecord.find(folder)
    assert not record.is_sent("wandb")
    wandb_server.mend()
    tear_down()
    monkeypatch.setattr(wandb_tracker, "FINISH_SECONDS", PATIENCE)
    (synced,) = sync_runs(folder.root, TrackingOptions())
    assert wandb_server.numbers(synced.run_id) == timed(folder.root)
    assert wandb_server.exit_codes == {synced.run_id: 0}


def test_a_start_that_fails_leaves_other_runs_of_the_process_alone(
    tmp_path, wandb_server, monkeypatch
):
    own = wandb.init(id="own", mode="online", reinit="create_new", settings=QUIET)
    own.log({"x": 1.0})
    monkeypatch.setattr(wandb_tracker, "INIT_SECONDS", 1.0)
    wandb_server.hang()
    run = begin(run_folder(tmp_path), "", trackers=ALONE)
    run.finish("KILLED")
    wandb_server.mend()
    own.log({"x": 2.0})
    own.finish()
    wait_until(lambda: "own" in wandb_server.exit_codes)
    assert [row["x"] for row in wandb_server.history("own")] == [1.0, 2.0]


HANGS = """
import sys
from pathlib import Path
from align.pipeline.jobs.tracker_sync import sync_runs
from align.schemas.config import TrackingOptions
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking import run as tracking, wandb_tracker

wandb_tracker.INIT_SECONDS = wandb_tracker.FINISH_SECONDS = 1.0
tracking.WAIT_SECONDS["FINISHED"] = 2.0
folder = RunFolder(Path("run"))
folder.prepare()
options = TrackingOptions(trackers=["wandb"])
run = tracking.open_training_run(options, folder, name="train", tags={}, keep_through=-1)
run.begin_sending()
run.log_metrics({"loss": 1.0}, step=1)
run.finish("FINISHED")
"""


def test_a_server_that_hangs_does_not_hold_the_exit(tmp_path, wandb_server):
    wandb_server.hang()
    done = subprocess.run(
        [sys.executable, "-c", HANGS],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=HELD_UP,
    )
    assert "align mlflow-sync" in done.stderr
