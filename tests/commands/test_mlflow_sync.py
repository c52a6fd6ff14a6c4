"""What a store that is down, dead, deaf or slow costs training, and how it learns the rest."""

import socket

import pytest

from align.schemas.checkpoint import RunEnding, RunIdentity
from align.schemas.config import TrackingOptions
from align.schemas.errors import LockedError, StorageError, UsageError
from align.stages.storage.disk.locks import owner_lock
from align.stages.storage.run.run_folder import ENDINGS
from align.stages.tracking import metrics_log
from align.stages.tracking import run as tracking
from align.stages.tracking.metrics_log import MetricsLog
from align.stages.tracking.run_record import RunRecord
from support.mlflow_runs import id_of, new_record, run_of, stored, warnings_in
from support.patience import wait_until
from support.refusals import refuses
from support.tracked_training import STEPS, begin, kill, learn, logged_numbers, run_folder, sync_run

pytestmark = pytest.mark.usefixtures("no_mlflow_settings")

FINISHED = RunEnding("finished", STEPS, STEPS, RunIdentity("cafe", 1, 0, {}, {}), ())


UPLOADER, SENDER = (f"{tracking.__name__}.{one}." for one in ("Uploader", "Sender"))
TRACKER = "align.stages.tracking.mlflow_tracker."


def held_nothing_up(entered):
    """No step asked the store, waited for the thread that does, or took what that one holds."""
    libraries = {"http", "mlflow", "queue", "requests", "socket", "sqlalchemy", "threading"}
    assert f"{metrics_log.__name__}.{MetricsLog.append.__qualname__}" in entered
    assert not [name for name in entered if name.startswith((UPLOADER, SENDER, TRACKER))]
    assert not {name.partition(".")[0] for name in entered} & (libraries | {"urllib3"})


def end(run, status="FINISHED"):
    """Ends a run as the end of its process would: nothing of it goes on."""
    run.finish(status)
    kill(run)


def synced_exactly(folder, **where):
    """Sends the rest; doing it again changes nothing."""
    own = TrackingOptions(uri=RunRecord.find(folder).facts.stores["mlflow"].address)
    first = sync_run(folder.root, own, **where)
    assert stored(first.uri, first.run_id) == logged_numbers(folder.root)
    told = run_of(first.uri, first.run_id)
    second = sync_run(folder.root, own, **where)
    assert (second.run_id, second.numbers_sent) == (first.run_id, 0)
    assert stored(first.uri, first.run_id) == logged_numbers(folder.root)
    again = run_of(first.uri, first.run_id)
    assert again.data.to_dictionary() == told.data.to_dictionary()
    return first, told


@pytest.mark.parametrize("is_deaf", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_slow_or_silent_store_holds_nothing_up(
    tmp_path, mlflow_server, caplog, monkeypatch, is_deaf
):
    folder = run_folder(tmp_path)
    mlflow_server.slow_down(1)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as deaf, monkeypatch.context() as short:
        short.setitem(tracking.WAIT_SECONDS, "FINISHED", 0.5)
        address = mlflow_server.uri
        if is_deaf:
            short.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
            address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        run = begin(folder, address)
        run.log_params({"lr": "0.1"})
        run.log_dataset("pairs", digest="ab" * 32, source="cache", context="training")
        run.log_model_link(folder.model, tags={})
        held_nothing_up(learn(run, range(STEPS)))
        run.finish("FINISHED")
        mlflow_server.mend()
        kill(run)
    assert len(warnings_in(caplog)) == 1
    synced, told = synced_exactly(folder, uri=mlflow_server.uri)
    if is_deaf:
        assert synced.numbers_sent == len(logged_numbers(folder.root)) == 2 * STEPS + 5
    assert (told.info.status, told.data.params) == ("FINISHED", {"lr": "0.1"})
    assert told.data.tags["align.method"] == "kto"
    assert len(told.inputs.dataset_inputs) == len(told.outputs.model_outputs) == 1


def test_a_server_that_comes_back_gets_the_rest(tmp_path, mlflow_server, caplog, monkeypatch):
    monkeypatch.setattr(tracking, "SECONDS_PER_TICK", 0.05)
    monkeypatch.setattr(tracking, "RETRY_SECONDS", 0.2)
    folder = run_folder(tmp_path)
    run = begin(folder, mlflow_server.uri)
    wait_until(lambda: id_of(run))
    learn(run, range(20), at=(10, mlflow_server.break_down))
    wait_until(lambda: warnings_in(caplog))
    mlflow_server.mend()
    wait_until(lambda: stored(mlflow_server.uri, id_of(run)) == logged_numbers(folder.root))
    held_nothing_up(learn(run, range(20, STEPS), at=(35, mlflow_server.stop)))
    end(run)
    assert len(warnings_in(caplog)) == 1
    mlflow_server.start()
    synced, told = synced_exactly(folder)
    assert synced.run_id == id_of(run)
    assert 0 < synced.numbers_sent < len(logged_numbers(folder.root))
    assert told.info.status == "FINISHED"


def test_an_answer_that_was_lost_makes_no_second_run(tmp_path, mlflow_server, monkeypatch):
    """The store made the run; that it did was never heard of here, nor in another shell."""
    folder = run_folder(tmp_path)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the shell")
    run = begin(folder, mlflow_server.uri)
    learn(run, range(STEPS))
    end(run)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    folder.sent.unlink()
    with folder.metrics.open("a") as lines:  # a second line of a step is no step trained again
        lines.write(f'{{"step":{STEPS - 1},"time":1900000000.5,"loss":2.5}}\n')
    assert synced_exactly(folder)[0].run_id == id_of(run)


def planted(tmp_path, store, **facts):
    """Somebody else's folder, which no store has heard of."""
    folder = run_folder(tmp_path)
    folder.prepare()
    log = MetricsLog(folder.metrics)
    log.append({"loss": 0.5}, step=1)
    log.close()
    new_record(folder, store, **facts)
    return folder


@pytest.mark.parametrize("status", ["KILLED", "FINISHED"])
def test_a_killed_run_is_recorded_as_its_ending_says(tmp_path, uri, status):
    """A killed one may have left a model, of a first length; a finished one says so itself."""
    folder = planted(tmp_path, uri)
    folder.model.mkdir()
    if status == "FINISHED":
        ENDINGS.replace(folder.ending, FINISHED)
    with owner_lock(folder.root, "training"), pytest.raises(LockedError):
        sync_run(folder.root, TrackingOptions(uri=uri))
    assert synced_exactly(folder)[1].info.status == status


def test_a_folder_does_not_decide_where_data_go(tmp_path, mlflow_server, monkeypatch):
    folder = planted(tmp_path, mlflow_server.uri)
    mlflow_server.break_down()
    for own in (TrackingOptions(), TrackingOptions(uri=f"sqlite:///{tmp_path}/mine.db")):
        with refuses(UsageError, "--uri", mlflow_server.uri):
            sync_run(folder.root, own)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.uri)
    with refuses(StorageError, mlflow_server.uri):
        sync_run(folder.root, TrackingOptions())  # it is the user's own by now
    mlflow_server.mend()
    # The store of an own run is asked with the own password, which is written nowhere.
    own = TrackingOptions(uri=mlflow_server.uri.replace("://", "://me:word@"))
    assert sync_run(folder.root, own).uri == mlflow_server.uri
    sync_run(folder.root, TrackingOptions(uri="sqlite:///mine.db"), uri=mlflow_server.uri)
