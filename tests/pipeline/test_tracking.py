"""What MLflow is told about a run, and what a run cares when it cannot be told."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from align.pipeline.mlflow_sync import sync_runs
from align.pipeline.precompute import precompute
from align.schemas.config import DataOptions, TrackingOptions
from align.schemas.errors import BadDataError, CorruptionError, UsageError
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.cleanup import is_tidy, remove_superseded
from align.stages.storage.fs import sha256_of
from align.stages.storage.manifest_file import load_manifest
from align.stages.tracking import journaled_run
from align.stages.tracking.mlflow_client import MlflowStore
from align.stages.tracking.outbox import load_ledger, new_record, open_ledger, unsent_runs
from support.mlflow_runs import open_store, the_run
from support.patience import PATIENCE
from support.stage_one import Heard, child, contents, run
from support.stub_reference import StubReference


@pytest.fixture
def tracked(config, uri, tmp_path, monkeypatch):
    """The config with one experiment of its own in the store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for status in journaled_run.PATIENCE_SECONDS:  # the machine may be busy
        monkeypatch.setitem(journaled_run.PATIENCE_SECONDS, status, 60.0)
    return replace(config, tracking=TrackingOptions(uri=uri, experiment=tmp_path.name))


def recorded(config):
    return the_run(open_store(config.tracking.uri), config.tracking.experiment)


def test_the_row_that_is_shown_is_in_no_record(tracked, tmp_path):
    progress = Heard()
    precompute(tracked, StubReference(), progress=progress, shows_row=True)
    assert recorded(tracked).info.status == "FINISHED"
    said = [part for line in progress.row for part in re.findall(r'[^"\\[\]]{12,}', line)]
    assert len(said) > 4
    store = Path(tracked.tracking.uri.removeprefix("sqlite:///"))
    files = [store, *(path for path in tmp_path.rglob("*") if path.is_file())]
    kept = b"".join(path.read_bytes() for path in files)
    assert not [part for part in said if part.encode() in kept]


def test_a_real_run_is_told_in_full(journey, world):
    """The run of the command itself, with the store in the folder it was started from."""
    client = open_store(f"sqlite:///{journey.cwd}/mlflow.db")
    run = the_run(client, "align")
    manifest = json.loads((journey.cache / "manifest.json").read_text())
    assert (run.info.status, run.info.run_name) == ("FINISHED", "precompute-ref")
    assert run.data.params == manifest["fingerprint"]
    assert len(run.data.params) >= 20
    metrics = run.data.metrics
    assert (metrics["rows"], metrics["branches/scored"], metrics["reuse_share"]) == (60, 240, 0)
    assert metrics["tokens_per_second"] > 0
    assert 0 <= metrics["padding_share"] < 1
    assert run.data.tags["align.cache_root"] == manifest["root"]
    assert run.data.tags["align.plan_key"] == manifest["plan_key"]


def test_a_real_run_keeps_the_manifest_and_names_the_data(journey, world, tmp_path):
    client = open_store(f"sqlite:///{journey.cwd}/mlflow.db")
    run = the_run(client, "align")
    kept = journey.cwd / "mlruns" / "align" / run.info.run_id / "artifacts"
    assert (kept / "manifest.json").read_bytes() == (journey.cache / "manifest.json").read_bytes()
    (entry,) = run.inputs.dataset_inputs
    assert entry.dataset.name == "data.parquet"
    tags = {tag.key: tag.value for tag in entry.tags}
    assert tags["align.digest"] == sha256_of(world.data.paired)


def test_reuse_is_told_and_a_run_that_does_nothing_is_not(tracked, tmp_path):
    run(replace(tracked, tracking=TrackingOptions(mlflow=False)))
    again = replace(tracked.cache, output=str(tmp_path / "b"), reuse=[tracked.cache.output])
    run(replace(tracked, cache=again))
    run(replace(tracked, cache=again))
    metrics = recorded(tracked).data.metrics
    assert (metrics["reuse_share"], metrics["branches/scored"]) == (1.0, 0)


def test_metrics_come_unit_by_unit_and_change_no_byte(tracked, clean):
    run(tracked)
    assert contents(tracked.cache.output) == clean
    client = open_store(tracked.tracking.uri)
    history = client.get_metric_history(recorded(tracked).info.run_id, "rows")
    assert sorted({point.step for point in history}) == list(range(1, 9))  # 120 rows, 16 a unit
    assert max(point.value for point in history) == 120


def test_dropped_rows_are_told(tracked, flawed):
    run(replace(tracked, data=flawed.data))
    assert recorded(tracked).data.metrics["dropped/empty_completion"] == 1


def test_a_run_over_bad_data_has_failed(tracked, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "chosen": "", "rejected": "b"}\n')
    with pytest.raises(BadDataError):
        run(replace(tracked, data=DataOptions(files=[str(tmp_path / "bad.jsonl")])))
    assert recorded(tracked).info.status == "FAILED"


def test_a_store_that_is_down_costs_one_warning(tracked, config, to, tmp_path, caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    run(replace(tracked, tracking=TrackingOptions(uri=uri)))
    assert [
        r.getMessage().partition(" failed")[0] for r in caplog.records if r.name == "align"
    ] == [f"MLflow at {uri}"]
    run(to(output=str(tmp_path / "clean")))
    made = contents(tracked.cache.output)
    kept = {name for name in made if name.startswith("_align/outbox/")}
    assert {Path(name).name for name in kept} == {"metrics.jsonl", "mlflow.json", "manifest.json"}
    assert {name: made[name] for name in made.keys() - kept} == contents(tmp_path / "clean")
    folder = CacheFolder(Path(tracked.cache.output))
    assert is_tidy(folder, load_manifest(folder))
    remove_superseded(folder)
    assert contents(folder.root) == made, "what is still to be sent stays"


def test_what_a_store_missed_of_stage_1_is_sent_by_mlflow_sync(tracked, mlflow_server):
    mlflow_server.stop()
    down = TrackingOptions(uri=mlflow_server.uri, experiment="late")
    done = run(replace(tracked, tracking=down))
    mlflow_server.start()
    (synced,) = sync_runs(Path(tracked.cache.output), down)
    told = open_store(mlflow_server.uri).get_run(synced.run_id)
    assert (told.info.status, told.info.run_name) == ("FINISHED", "precompute-ref")
    assert told.data.params == done.manifest.fingerprint
    assert told.data.tags["align.cache_root"] == done.manifest.root
    history = open_store(mlflow_server.uri).get_metric_history(synced.run_id, "rows")
    assert [point.step for point in history] == [*range(1, 9), 8]
    assert len(told.inputs.dataset_inputs) == 1
    assert not CacheFolder(Path(tracked.cache.output)).outbox.exists()


def test_a_record_that_cannot_be_sent_does_not_keep_the_others(tracked, mlflow_server):
    mlflow_server.stop()
    down = TrackingOptions(uri=mlflow_server.uri, experiment="damaged")
    home = Path(tracked.cache.output)
    run(replace(tracked, tracking=down))
    (first,) = unsent_runs(home)
    damaged = new_record(home)
    damaged.mlflow.write_text("{}")
    damaged.root.rename(damaged.root.with_name(f"{'0' * 13}-{'0' * 8}"))  # the oldest
    mlflow_server.start()
    with pytest.raises(CorruptionError, match="mlflow.json is damaged"):
        sync_runs(home, down)
    assert not first.root.exists()
    assert len(runs_of(replace(tracked, tracking=down))) == 1


def runs_of(config):
    """All runs of the experiment, the oldest first."""
    client = open_store(config.tracking.uri)
    found = client.get_experiment_by_name(config.tracking.experiment)
    return client.search_runs([found.experiment_id], order_by=["attributes.start_time"])


def kill_at(config, failpoint):
    """Stage 1 as a SIGKILL leaves it."""
    process = child(config, f"{failpoint}=kill")
    process.join(PATIENCE)
    assert process.exitcode == -9
    (killed,) = runs_of(config)
    assert killed.info.status == "RUNNING"
    return killed.info.run_id


@pytest.mark.parametrize("failpoint", ["plan.after_link", "commit.done", "gc.done"])
def test_a_run_that_was_killed_is_ended_by_the_next(tracked, failpoint):
    """The last of them is killed when its cache is whole: nothing is left to be done."""
    killed = kill_at(tracked, failpoint)
    done = run(tracked)
    first, *more = runs_of(tracked)
    assert (first.info.run_id, first.info.status) == (killed, "KILLED")
    assert first.info.end_time >= first.info.start_time
    assert done.was_complete == (failpoint == "gc.done")
    told = [(one.info.status, one.data.tags["align.goes_on_from"]) for one in more]
    assert told == ([] if done.was_complete else [("FINISHED", killed)])
    assert not CacheFolder(Path(tracked.cache.output)).outbox.exists()


def test_a_run_that_was_killed_is_ended_by_mlflow_sync(tracked):
    killed = kill_at(tracked, "commit.done")
    folder = Path(tracked.cache.output)
    with pytest.raises(UsageError, match=f"pass --uri {tracked.tracking.uri}"):
        sync_runs(folder, TrackingOptions(uri="sqlite:///elsewhere.db"))
    (synced,) = sync_runs(folder, tracked.tracking)
    assert (synced.run_id, synced.status) == (killed, "KILLED")
    assert recorded(tracked).info.status == "KILLED"
    with pytest.raises(UsageError, match="no run that was recorded"):
        sync_runs(folder, tracked.tracking)


def test_a_run_that_was_killed_before_the_store_knew_it_is_there_afterwards(tracked, mlflow_server):
    """Both are sent once the store answers: how the first ended, and that the second went on."""
    mlflow_server.stop()
    down = replace(tracked, tracking=TrackingOptions(uri=mlflow_server.uri, experiment="killed"))
    process = child(down, "commit.done=kill@2")
    process.join(PATIENCE)
    assert process.exitcode == -9
    mlflow_server.start()
    run(down)
    first, second = runs_of(down)
    assert (first.info.status, second.info.status) == ("KILLED", "FINISHED")
    assert second.data.tags["align.goes_on_from"] == first.info.run_id
    assert first.data.params == second.data.params
    assert first.data.metrics["rows"] == 16


def test_an_end_that_the_store_did_not_hear_is_told_by_the_next(tracked, monkeypatch):
    """It is down by the time that the run is over, and hears how that ended, not that it was."""

    def refuse(*_, **__):
        raise OSError("the store is down")

    with monkeypatch.context() as down:
        down.setattr(MlflowStore, "finish", refuse)
        run(tracked)
    assert recorded(tracked).info.status == "RUNNING"
    assert run(tracked).was_complete
    assert recorded(tracked).info.status == "FINISHED"


def test_what_a_folder_says_of_an_earlier_run_never_ends_this_one(tracked, caplog):
    """Somebody else's run in somebody else's store, and one that cannot be read."""
    folder = CacheFolder(Path(tracked.cache.output))
    folder.prepare()
    new_record(folder.root).mlflow.write_text("{")
    theirs = new_record(folder.root)
    ledger = open_ledger(theirs.mlflow, uri="http://theirs", experiment="x", run_name="x")
    run(tracked)
    assert [one.info.status for one in runs_of(tracked)] == ["FINISHED"]
    said = [r.getMessage() for r in caplog.records if r.name == "align"]
    damaged, foreign = sorted(said, key=lambda one: "is damaged" not in one)
    assert "is damaged" in damaged
    assert "names the store http://theirs" in foreign
    assert load_ledger(theirs.mlflow).record == ledger.record
    assert len(unsent_runs(folder.root)) == 2
