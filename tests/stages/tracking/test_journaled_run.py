import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from align.pipeline.mlflow_sync import sync_run
from align.schemas.config import TrackingOptions
from align.schemas.errors import CorruptionError, UsageError
from align.stages.tracking import delivery
from align.stages.tracking.outbox import load_ledger, plain_uri
from support.mlflow_runs import open_store
from support.patience import PATIENCE
from support.tracked_training import begin, journalled, learn, run_folder, run_of, stored, wait_for

pytestmark = pytest.mark.usefixtures("no_mlflow_settings")


def test_mlflow_is_told_all_of_a_run(uri, tmp_path):
    folder = run_folder(tmp_path)
    run = begin(folder, uri, experiment="mine")
    run.log_params({"lr": "0.1", "seed": "0"})
    run.log_dataset("pairs", digest="ab" * 32, source="cache", context="training")
    learn(run, range(1, 21))
    run.log_params({"lr": "0.2", "seed": "0"})
    folder.config.write_text("train: {}")
    run.log_artifact(folder.config)
    run.log_model_link(folder.model, tags={"align.cache_root": "cafe"})
    run.finish("FINISHED")
    told = run_of(uri, run.run_id)
    assert (told.info.status, told.info.run_name) == ("FINISHED", "train")
    assert told.data.params == {"lr": "0.1", "seed": "0"}
    assert told.data.tags["changed.lr"] == "0.2"
    assert "changed.seed" not in told.data.tags
    assert told.data.tags["align.method"] == "kto"
    assert stored(uri, run.run_id) == journalled(folder.root)
    assert len(journalled(folder.root)) == 20 * 2 + 2
    (entry,) = told.inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("pairs", "ab" * 18)
    assert {tag.key: tag.value for tag in entry.tags} == {
        "mlflow.data.context": "training",
        "align.digest": "ab" * 32,
    }
    client = open_store(uri)
    assert [item.path for item in client.list_artifacts(run.run_id)] == ["config.yaml"]
    (output,) = told.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert model.tags["align.path"] == str(folder.model)
    assert model.tags["align.cache_root"] == "cafe"
    assert model.source_run_id == run.run_id


def test_a_run_that_goes_on_is_the_same_run(uri, tmp_path):
    """The first was stopped after step 30, and saved."""
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    first.log_params({"lr": "0.1"})
    learn(first, range(1, 31))
    first.finish("KILLED")
    second = begin(folder, uri, keep_through=30)
    assert second.run_id == first.run_id
    wait_for(lambda: run_of(uri, second.run_id).info.status == "RUNNING")
    second.log_params({"lr": "0.3"})
    learn(second, range(31, 51))
    second.finish("FINISHED")
    told = run_of(uri, second.run_id)
    assert told.info.status == "FINISHED"
    assert (told.data.params["lr"], told.data.tags["changed.lr"]) == ("0.1", "0.3")
    assert stored(uri, second.run_id) == journalled(folder.root)
    assert "align.goes_on_from" not in told.data.tags


def killed(run):
    """Leaves a run as a process does that is killed once MLflow has heard all of it."""
    sender = run._sender
    sender._over.set()
    sender._thread.join(PATIENCE)


def test_what_was_given_up_stays_with_the_run_that_measured_it(uri, tmp_path):
    """The first was killed ten steps after its last checkpoint; the second is a shorter one."""
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    learn(first, range(1, 31))
    killed(first)
    assert run_of(uri, first.run_id).info.status == "RUNNING"
    second = begin(folder, uri, keep_through=20)
    for step in range(21, 26):
        second.log_metrics({"loss": 100.0 + step}, step=step)
    second.finish("FINISHED")
    assert second.run_id != first.run_id
    assert stored(uri, second.run_id) == journalled(folder.root)
    told = run_of(uri, second.run_id)
    assert told.data.metrics["loss"] == 125
    assert told.data.tags["align.goes_on_from"] == first.run_id
    assert told.data.tags["align.run_key"] == second.run_key
    assert run_of(uri, first.run_id).info.status == "KILLED"


def test_what_a_power_loss_took_from_the_journal_is_given_up_too(uri, tmp_path):
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    learn(first, range(1, 31))
    first.finish("KILLED")
    kept = folder.metrics.read_text().splitlines(keepends=True)[:10]
    folder.metrics.write_text("".join(kept))
    second = begin(folder, uri, keep_through=20)
    second.finish("FINISHED")
    assert second.run_id != first.run_id
    assert stored(uri, second.run_id) == journalled(folder.root)


def test_a_run_that_goes_on_without_mlflow_is_written_down_for_later(uri, tmp_path):
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    learn(first, range(5))
    first.finish("KILLED")
    second = begin(folder, "", keep_through=4, mlflow=False)
    learn(second, range(5, 8))
    second.finish("FINISHED")
    assert run_of(uri, first.run_id).info.status == "KILLED"
    synced = sync_run(folder.root, TrackingOptions(uri=uri))
    assert (synced.run_id, synced.status) == (first.run_id, "FINISHED")
    assert stored(uri, first.run_id) == journalled(folder.root)


def test_where_the_run_is_gone_from_the_store_there_is_a_new_one(tmp_path, new_store):
    folder = run_folder(tmp_path)
    first = begin(folder, f"sqlite:///{new_store()}")
    learn(first, range(5))
    first.finish("KILLED")
    again = f"sqlite:///{new_store()}"
    second = begin(folder, again, keep_through=4)
    learn(second, range(5, 8))
    second.finish("FINISHED")
    assert second.run_id != first.run_id
    assert stored(again, second.run_id) == journalled(folder.root)


def test_without_mlflow_there_is_still_the_journal(tmp_path):
    folder = run_folder(tmp_path)
    run = begin(folder, "", mlflow=False)
    learn(run, range(3))
    run.finish("FINISHED")
    assert run.run_id == ""
    assert len(journalled(folder.root)) == 7
    assert not folder.mlflow.exists()


def test_a_store_that_breaks_is_left_alone_and_warned_of_once(tmp_path, new_store, caplog):
    store, folder = new_store(), run_folder(tmp_path)
    run = begin(folder, f"sqlite:///{store}")
    wait_for(lambda: run.run_id)
    with closing(sqlite3.connect(store)) as database, database:
        database.execute("DROP TABLE metrics")
    learn(run, range(50))
    run.finish("FINISHED")
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "align"]
    assert f"align mlflow-sync {folder.root}" in warning
    assert load_ledger(folder.mlflow).record.status == "FINISHED"


@pytest.mark.parametrize(
    ("uri", "plain"),
    [
        ("sqlite:///mlflow.db", "sqlite:///{here}/mlflow.db"),
        ("sqlite:////a/mlflow.db", "sqlite:////a/mlflow.db"),
        ("http://me:pw@host:5000/x", "http://host:5000/x"),
        ("mlruns", "{here}/mlruns"),
        ("postgresql://me:pw@host/db", "postgresql://host/db"),
    ],
)
def test_an_address_means_the_same_from_everywhere(tmp_path, uri, plain):
    assert plain_uri(uri) == plain.format(here=tmp_path)


def test_a_ledger_that_is_not_there_or_damaged_is_told(tmp_path):
    folder = run_folder(tmp_path)
    folder.prepare()
    with pytest.raises(UsageError, match="no run that was recorded"):
        load_ledger(folder.mlflow)
    folder.mlflow.write_text("{")
    with pytest.raises(CorruptionError, match="damaged"):
        load_ledger(folder.mlflow)


def test_mlflow_says_nothing_by_itself(tmp_path):
    code = f"""
import pathlib
from align.schemas.config import TrackingOptions
from align.stages.storage.run_folder import RunFolder
from align.stages.tracking.journaled_run import open_training_run, recorded
here = pathlib.Path("{tmp_path}")
options = TrackingOptions(uri="sqlite:///{tmp_path}/quiet.db")
with recorded(options, here / "cache", "x", is_recorded=True) as run:
    assert run.run_id
    run.log_metrics({{"a": 1.0}})
folder = RunFolder(here / "run")
folder.prepare()
run = open_training_run(options, folder, name="x", tags={{}}, keep_through=-1)
run.log_metrics({{"a": 1.0}}, step=1)
run.finish("FINISHED")
assert run.run_id
"""
    (tmp_path / "cache" / "_align").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_host_that_is_strict_with_warnings_can_use_mlflow_after_a_run_without_patience(tmp_path):
    code = f"""
import pathlib, threading, warnings
from align.schemas.config import TrackingOptions
from align.stages.storage.run_folder import RunFolder
from align.stages.tracking import journaled_run
journaled_run.PATIENCE_SECONDS["KILLED"] = 0.01
folder = RunFolder(pathlib.Path("{tmp_path}/run"))
folder.prepare()
options = TrackingOptions(uri="sqlite:///{tmp_path}/strict.db")
run = journaled_run.open_training_run(options, folder, name="x", tags={{}}, keep_through=-1)
(sender,) = [one for one in threading.enumerate() if one.name == "mlflow"]
run.finish("KILLED")
sender.join()
warnings.simplefilter("ignore")
import mlflow
mlflow.MlflowClient("sqlite:///{tmp_path}/strict.db").search_experiments()
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_training_sends_nothing_before_its_first_step_and_all_after_it(
    tmp_path, uri, monkeypatch
):
    monkeypatch.setattr(delivery, "FIRST_STEP_SECONDS", 1e6)
    run = begin(run_folder(tmp_path), uri, sends=False)
    run.log_metrics({"eval/loss": 0.5}, step=0)
    assert not run.run_id
    run.begin_sending()
    wait_for(lambda: run.run_id and stored(uri, run.run_id) == [("eval/loss", 0, 0.5)])
    run.finish("FINISHED")
