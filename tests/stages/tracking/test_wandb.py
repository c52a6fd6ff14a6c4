"""Offline runs of wandb hold the journal's numbers once each, whatever became of who wrote them."""

import os
from pathlib import Path

import psutil
import pytest
import wandb

from align.schemas.config import TrackingOptions
from align.schemas.errors import UsageError
from align.stages.tracking import delivery, wandb_tracker
from align.stages.tracking.journaled_run import recorded, tagged
from align.stages.tracking.tracker import GROUP_TAG, kind_of
from align.stages.tracking.wandb_tracker import FOLDER
from support.mlflow_runs import warnings_in
from support.patience import PATIENCE
from support.refusals import refuses
from support.tracked_training import begin, learn, run_folder, sender_of, sync_run, wait_for
from support.tracker_contract import require_tracker_contract
from support.wandb_runs import (
    WandbStore,
    config,
    journalled,
    numbers,
    records,
    rows,
    run_file,
    tear_down,
    wait_for_records,
)

ALONE = ["wandb"]
NAMES = ("API_KEY", "DIR", "ENTITY", "ERROR_REPORTING", "MODE", "PROJECT")


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """All that wandb imports for a run is imported, which each fork would do for itself."""
    settings = wandb.Settings(
        mode="offline", silent=True, console="off", root_dir=str(tmp_path_factory.mktemp("first"))
    )
    with kind_of("wandb").quiet():
        wandb.init(settings=settings).finish()
    tear_down()


@pytest.fixture(autouse=True)
def wandb_alone(imported, here, monkeypatch):
    """Nobody has set anything for wandb, and its service ends with the test."""
    monkeypatch.setattr(wandb_tracker, "FLUSH_SECONDS", 0.01)
    for name in NAMES:
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    yield
    tear_down()


def test_wandb_keeps_to_the_contract(tmp_path):
    require_tracker_contract(kind_of("wandb"), WandbStore.new, tmp_path)


@pytest.fixture
def killed(tmp_path):
    """A run that sent thirty steps, and then no more."""
    folder = run_folder(tmp_path)
    run = begin(folder, "", trackers=ALONE)
    run.log_params({"lr": "1e-06", "seed": "7", "model": "a|b", "lora": "False", "date": "0123"})
    learn(run, range(1, 31))
    sender_of(run)._over.set()
    sender_of(run)._thread.join(PATIENCE)
    wait_for_records(run.run_ids["wandb"])
    tear_down()
    return folder, run


def the_file(folder):
    """That of the one run that is there."""
    (found,) = (folder.root / FOLDER).glob("*/*.wandb")
    return found


def test_a_run_that_goes_on_is_one_with_each_number_at_its_step_and_time(killed):
    folder, first = killed
    assert numbers(the_file(folder)) == journalled(folder.root)
    assert len(numbers(the_file(folder))) == 30 * 2 + 3
    second = begin(folder, "", trackers=ALONE, keep_through=30)
    learn(second, range(31, 41))
    second.finish("FINISHED")
    assert second.run_ids == first.run_ids
    file = the_file(folder)
    assert file == run_file(folder.root / FOLDER, second.run_ids["wandb"])
    assert numbers(file) == journalled(folder.root)
    told = config(file)
    plain = {name: told[name] for name in ("lr", "seed", "model", "lora", "date")}
    assert plain == {"lr": 1e-6, "seed": 7, "model": "a|b", "lora": False, "date": "0123"}
    assert told["align"]["status"] == "FINISHED"
    (ended,) = [record.exit for record in records(file) if record.HasField("exit")]
    assert ended.exit_code == 0
    metrics = [record.metric for record in records(file) if record.HasField("metric")]
    assert {(one.glob_name, one.step_metric) for one in metrics} == {("*", "step")}
    steps = [row["_step"] for row in rows(file)]
    assert steps == sorted({*steps}), "a server drops a row whose step does not rise"
    synced = sync_run(folder.root, TrackingOptions())
    assert (synced.run_id, synced.points_sent) == (second.run_ids["wandb"], 0)
    assert the_file(folder) == file


def test_steps_that_are_trained_again_are_shown_once(killed):
    folder, first = killed
    second = begin(folder, "", trackers=ALONE, keep_through=20)
    for step in range(21, 26):
        second.log_metrics({"loss": 100.0 + step}, step=step)
    second.finish("KILLED")
    file = the_file(folder)
    assert second.run_ids != first.run_ids
    assert numbers(file) == journalled(folder.root)
    again = [value for name, step, value, _ in numbers(file) if (name, step) > ("loss", 20)]
    assert again[:5] == [121.0, 122.0, 123.0, 124.0, 125.0]
    assert config(file)["align"]["status"] == "KILLED"
    assert config(file)["align"]["tags"]["align.goes_on_from"] == first.run_ids["wandb"]


@pytest.mark.parametrize("damage", ["cut", "gone", "no note", "a note of garbage"])
def test_files_that_lost_something_are_made_again(tmp_path, damage):
    folder = run_folder(tmp_path)
    run = begin(folder, "", trackers=ALONE)
    learn(run, range(3))
    run.finish("FINISHED")
    note = the_file(folder).parent / wandb_tracker.NOTE
    if damage == "cut":
        os.truncate(the_file(folder), 1000)
    elif damage == "gone":
        the_file(folder).unlink()
    elif damage == "no note":
        note.unlink()
    else:
        note.write_text("[" * 100_000)
    assert sync_run(folder.root, TrackingOptions()).points_sent == len(journalled(folder.root))
    assert numbers(the_file(folder)) == journalled(folder.root)


def test_a_service_that_is_killed_costs_a_warning_and_no_number(tmp_path, monkeypatch, caplog):
    """Nor does the step that is trained wait for it: it enters no module of wandb."""
    monkeypatch.setattr(delivery, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(delivery, "SECONDS_PER_TICK", 0.05)
    folder = run_folder(tmp_path)
    run = begin(folder, "", trackers=ALONE)
    wait_for(lambda: run.run_ids)
    entered = learn(run, range(1, 20), at=(10, kill_service))
    assert "align.stages.tracking.journal" in entered
    assert not any(name.startswith(("wandb", wandb_tracker.__name__)) for name in entered if name)
    run.finish("FINISHED")
    assert numbers(the_file(folder)) == journalled(folder.root)
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
    monkeypatch.setenv("WANDB_PROJECT", "prefs/of: mine")
    folder = run_folder(tmp_path)
    run = begin(folder, "", trackers=ALONE)
    run.finish("FINISHED")
    assert not [one for one in caplog.records if one.name == "align"]  # no call failed at first
    written = [path for path in (folder.root / FOLDER).rglob("*") if path.is_file()]
    assert not [path for path in written if b"0123456789" * 4 in path.read_bytes()]
    assert not [path for path in written if path.parent.name == "files"], "nothing to upload"
    told = [record.run for record in records(the_file(folder)) if record.HasField("run")]
    assert {(one.host, one.project) for one in told} == {("-", "prefs-of- mine")}
    assert not any(record.HasField("environment") for record in records(the_file(folder)))


def test_runs_of_a_sweep_are_a_group_in_the_folder_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "all"))
    options = TrackingOptions(trackers=ALONE)
    home = tmp_path / "sweep"
    home.mkdir()
    with recorded(options, home, "sweep") as parent:
        with tagged({GROUP_TAG: str(home)}, parent):
            run = begin(run_folder(tmp_path), "", trackers=ALONE)
        run.finish("FINISHED")
    file = run_file(tmp_path / "all" / FOLDER, run.run_ids["wandb"])
    told = [record.run for record in records(file) if record.HasField("run")]
    assert {(one.run_group, one.display_name) for one in told} == {("sweep", "train")}
    assert config(file)["align"]["tags"]["align.parent"] == parent.run_ids["wandb"]
    run_file(tmp_path / "all" / FOLDER, parent.run_ids["wandb"])
    assert not (tmp_path / "run" / FOLDER).exists()


def test_a_link_leads_no_number_out_of_the_run(tmp_path, caplog):
    folder = run_folder(tmp_path)
    folder.prepare()
    (tmp_path / "elsewhere").mkdir()
    (folder.root / FOLDER).symlink_to(tmp_path / "elsewhere")
    begin(folder, "", trackers=ALONE).finish("FINISHED")
    assert not [*Path(tmp_path / "elsewhere").iterdir()]
    assert FOLDER in caplog.text


@pytest.mark.parametrize("mode", ["online", "disabled"])
def test_a_mode_that_is_not_kept_to_is_refused(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    with refuses(UsageError, "WANDB_MODE", "offline"):
        begin(run_folder(tmp_path), "", trackers=ALONE)
