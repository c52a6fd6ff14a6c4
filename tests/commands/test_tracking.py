"""What MLflow is told about stage 1, and what a run cares when it cannot be told."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from align.pipeline.jobs.tracker_sync import sync_runs
from align.pipeline.precompute.precompute import precompute
from align.schemas.config import TrackingOptions
from align.schemas.errors import CorruptionError, UsageError
from align.stages.storage.cache_work import CacheWork
from align.stages.storage.disk.fs import sha256_of
from align.stages.tracking import run as tracking
from align.stages.tracking.run_record import RunRecord, new_outbox_folder, unsent_runs
from support.mlflow_runs import new_record, open_store, the_run, warnings_in
from support.patience import PATIENCE
from support.refusals import refuses
from support.stage_one import Heard, child, contents, run
from support.stub_reference import StubReference


@pytest.fixture
def tracked(config, uri, tmp_path, monkeypatch):
    """The config with one experiment of its own in the store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for status in tracking.WAIT_SECONDS:  # the machine may be busy
        monkeypatch.setitem(tracking.WAIT_SECONDS, status, 60.0)
    return replace(config, tracking=TrackingOptions(uri=uri, experiment=tmp_path.name))


@pytest.fixture
def down(tracked, mlflow_server):
    """The same with a server that does not listen yet."""
    mlflow_server.stop()
    return replace(tracked, tracking=replace(tracked.tracking, uri=mlflow_server.uri))


def recorded(config):
    """The runs of the experiment, the oldest first."""
    client = open_store(config.tracking.uri)
    found = client.get_experiment_by_name(config.tracking.experiment)
    return client.search_runs([found.experiment_id], order_by=["attributes.start_time"])


def history_of(config, run):
    """The steps and the values of the number of rows."""
    points = open_store(config.tracking.uri).get_metric_history(run.info.run_id, "rows")
    return [(point.step, point.value) for point in points]


def output_of(config):
    return CacheWork(Path(config.cache.output), "0" * 64)


def statuses(config):
    return [one.info.status for one in recorded(config)]


def test_the_row_that_is_shown_is_in_no_record(tracked, tmp_path):
    progress = Heard()
    precompute(tracked, StubReference(), progress=progress, shows_row=True)
    assert statuses(tracked) == ["FINISHED"]
    said = [part for line in progress.row for part in re.findall(r'[^"\\[\]]{12,}', line)]
    assert len(said) > 4
    store = Path(tracked.tracking.uri.removeprefix("sqlite:///"))
    files = [store, *(path for path in tmp_path.rglob("*") if path.is_file())]
    kept = b"".join(path.read_bytes() for path in files)
    assert not [part for part in said if part.encode() in kept]


def test_a_real_run_is_told_in_full_with_its_manifest_and_its_data(journey, world):
    """The run of the command itself, with the store in the folder it was started from."""
    run = the_run(open_store(f"sqlite:///{journey.cwd}/mlflow.db"), "align")
    manifest = json.loads((journey.cache / "manifest.json").read_text())
    named = f"{Path(manifest['model']).parent.name} · precompute-ref · data"
    assert (run.info.status, run.info.run_name) == ("FINISHED", named)
    note = run.data.tags["mlflow.note.content"]
    assert "60 rows" in note
    assert str(journey.cache) in note
    assert run.data.params == manifest["fingerprint"]
    metrics = run.data.metrics
    branches = metrics["completions/scored"] + metrics["completions/reused"]
    assert (metrics["rows"], branches) == (60, 240)
    assert run.data.tags["align.cache_root"] == manifest["root"]
    kept = journey.cwd / "mlruns" / "align" / run.info.run_id / "artifacts"
    assert (kept / "manifest.json").read_bytes() == (journey.cache / "manifest.json").read_bytes()
    (entry,) = run.inputs.dataset_inputs
    assert entry.dataset.name == "data.parquet"
    tags = {tag.key: tag.value for tag in entry.tags}
    assert tags["align.digest"] == sha256_of(world.data.paired)


def test_metrics_come_unit_by_unit_and_change_no_byte(tracked, flawed, clean_of_flawed, tmp_path):
    run(replace(tracked, data=flawed.data))
    run(replace(tracked, data=flawed.data))  # which does nothing, and is not told
    assert contents(tracked.cache.output) == clean_of_flawed
    (told,) = recorded(tracked)
    assert told.data.metrics["dropped/empty_completion"] == 1
    history = history_of(tracked, told)
    assert sorted({step for step, _ in history}) == list(range(1, 9))  # 120 rows, 16 a unit
    assert max(value for _, value in history) == 120
    again = replace(tracked.cache, output=str(tmp_path / "b"), reuse=[tracked.cache.output])
    run(replace(tracked, data=flawed.data, cache=again))
    metrics = recorded(tracked)[1].data.metrics
    assert (metrics["reuse_share"], metrics["completions/scored"]) == (1.0, 0)


def kill_at(config, fault):
    """Stage 1 as a SIGKILL leaves it."""
    process = child(config, fault)
    process.join(PATIENCE)
    assert process.exitcode == -9


def test_a_store_that_was_down_gets_all_by_mlflow_sync(down, clean, mlflow_server, caplog):
    """Also of a run that was killed before."""
    kill_at(down, "after:fsync_folder:commits=kill@2")
    done = run(down)
    (warning,) = warnings_in(caplog)
    assert mlflow_server.uri in warning
    folder = output_of(down)
    made = contents(folder.root)
    assert {name: made[name] for name in made if "_align/outbox/" not in name} == clean
    assert folder.is_tidy(folder.manifest())

    mlflow_server.start()
    killed, finished = sync_runs(folder.root, down.tracking)
    first, told = recorded(down)
    assert (first.info.run_id, first.info.status) == (killed.run_id, "KILLED")
    assert (told.info.run_id, told.info.status) == (finished.run_id, "FINISHED")
    assert told.data.params == done.manifest.fingerprint
    assert told.data.tags["align.cache_root"] == done.manifest.root
    steps = [step for step, _ in history_of(down, told)]
    assert steps == [*range(1, len(steps)), len(steps) - 1]
    assert len(told.inputs.dataset_inputs) == 1
    assert not unsent_runs(folder.root)


def test_mlflow_sync_ends_killed_runs(tracked):
    """The last of them is killed when its cache is whole: nothing is left to be done."""
    home = output_of(tracked).root
    kill_at(tracked, "after:fsync_folder:commits=kill")
    kill_at(tracked, "after:remove_tree:.trash-*=kill")
    with refuses(UsageError, "--uri", tracked.tracking.uri):
        sync_runs(home, TrackingOptions(uri="sqlite:///elsewhere.db"))
    damaged = new_outbox_folder(home)
    damaged.run_record.write_text("{}")
    damaged.root.rename(damaged.root.with_name(f"{'0' * 13}-{'0' * 8}"))  # the oldest
    with refuses(CorruptionError, damaged.run_record.name):
        sync_runs(home, tracked.tracking)
    assert statuses(tracked) == ["KILLED", "KILLED"]
    assert len(unsent_runs(home)) == 1  # the damaged
    assert run(tracked).was_complete
    first, second = recorded(tracked)
    assert first.info.end_time >= first.info.start_time
    assert second.data.tags["align.stage"] == "precompute-ref"


def test_what_a_folder_says_of_an_earlier_run_never_ends_this_one(tracked, caplog):
    """Somebody else's run in somebody else's store, and one that cannot be read."""
    folder = output_of(tracked)
    folder.prepare()
    new_outbox_folder(folder.root).run_record.write_text("{")
    theirs = new_record(new_outbox_folder(folder.root), "http://theirs")
    run(tracked)
    assert statuses(tracked) == ["FINISHED"]
    (damaged,) = warnings_in(caplog)
    assert theirs.folder.run_record.name in damaged
    assert RunRecord.find(theirs.folder).sent("mlflow").run_id == ""
    assert len(unsent_runs(folder.root)) == 2
