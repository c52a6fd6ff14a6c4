"""The record of a run that is not a training: what MLflow gets of it, and what waits on disk."""

import socket
from pathlib import Path

import pytest

from align.schemas.errors import Interrupted
from align.stages.storage.cache import Cache
from align.stages.storage.disk.locks import owner_lock
from align.stages.tracking import journaled_run, uploader
from align.stages.tracking.mlflow_silence import mlflow_silenced
from align.stages.tracking.mlflow_sqlite import artifacts_beside
from align.stages.tracking.mlflow_tracker import MlflowTracker
from align.stages.tracking.run_record import RunRecord, new_outbox_folder, unsent_runs
from support.mlflow_runs import begun, id_of, key_of, new_record, open_store, warnings_in
from support.patience import wait_until

pytestmark = pytest.mark.usefixtures("no_mlflow_settings")


@pytest.fixture(autouse=True)
def _waits_long(monkeypatch):
    """The machine may be busy."""
    for status in journaled_run.WAIT_SECONDS:
        monkeypatch.setitem(journaled_run.WAIT_SECONDS, status, 60.0)


@pytest.fixture
def home(tmp_path):
    """The folder of a cache."""
    folder = tmp_path / "cache"
    (folder / "_align").mkdir(parents=True)
    return folder


@pytest.fixture
def tries(monkeypatch):
    """How many seconds each connection to a server was given, in order."""
    seconds, connect = [], socket.socket.connect

    def watched(connection, address):
        seconds.append(connection.gettimeout())
        return connect(connection, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    return seconds


def read(uri, run):
    return open_store(uri).get_run(id_of(run))


def test_a_run_holds_what_was_logged_and_leaves_nothing_behind(uri, home, tmp_path, caplog):
    (tmp_path / "note.txt").write_text("hello")
    with begun(home, uri, experiment="mine") as run:
        run.log_metrics({"tokens/s": 5.0, "odd@name": 1.5}, step=3)
        # As stage 1 does at its end: the last unit, then the whole.
        run.log_metrics({"rows": 16.0}, step=4)
        run.log_metrics({"rows": 60.0}, step=4)
        run.set_tags({"align.root": "cafe"})
        run.log_artifact(tmp_path / "note.txt")
        # More than one request takes, and one that is too long.
        run.log_params({"long": "x" * 7000, **{f"p{number}": "x" for number in range(100)}})
    assert not Cache(home).outbox.exists()
    stored = read(uri, run)
    assert (stored.info.run_name, stored.info.status) == ("precompute-ref", "FINISHED")
    assert stored.data.metrics == {"tokens/s": 5.0, "odd_name": 1.5, "rows": 60.0}
    assert (len(stored.data.params), len(stored.data.params["long"])) == (101, 6000)
    tags = {"align.stage": "precompute-ref", "align.root": "cafe", "align.run_key": key_of(run)}
    assert tags.items() <= stored.data.tags.items()
    assert {"align.version", "torch.version", "mlflow.user"} <= set(stored.data.tags)
    client = open_store(uri)
    rows = client.get_metric_history(id_of(run), "rows")
    assert [(point.step, point.value) for point in rows] == [(4, 16.0), (4, 60.0)]
    assert [item.path for item in client.list_artifacts(id_of(run))] == ["note.txt"]
    assert client.get_experiment(stored.info.experiment_id).name == "mine"
    assert not warnings_in(caplog)


def test_the_store_learns_how_the_work_ended_and_the_first_word_counts(uri, home):
    for error, status in (
        (Interrupted(15), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (ValueError(), "FAILED"),
    ):
        with pytest.raises(type(error)), begun(home, uri) as run:
            raise error
        assert read(uri, run).info.status == status
    with begun(home, uri) as run:
        run.finish("FAILED")
    assert read(uri, run).info.status == "FAILED"


def test_the_default_store_lies_in_the_current_folder_and_is_durable(home, tmp_path):
    with begun(home, "") as run:
        pass
    made = f"sqlite:///{tmp_path}/mlflow.db"
    assert read(made, run).info.status == "FINISHED"
    with mlflow_silenced():  # it was built in a hurry, by a process that waited for no disk
        store = MlflowTracker(made)
        with store.client._tracking_client.store.engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL


@pytest.mark.parametrize("address", ["ftp://nowhere", "http://[", "sqlite:////proc/none/x.db"])
def test_a_store_that_cannot_be_costs_one_warning(address, home, caplog):
    with begun(home, address) as run:
        run.log_params({"a": "b"})
    (warning,) = warnings_in(caplog)
    assert f"align mlflow-sync {home}" in warning
    (left,) = unsent_runs(home)
    assert RunRecord.read(left).facts.params == {"a": "b"}


def test_a_server_that_never_answers_costs_one_warning_and_what_the_user_gave_it(
    home, caplog, monkeypatch, tries
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with (
        socket.create_server(("127.0.0.1", 0), backlog=16) as silent,
        begun(home, f"http://127.0.0.1:{silent.getsockname()[1]}") as run,
    ):
        run.log_metrics({"a": 1.0})
    assert tries == [1]  # and none at the end: it may hang again
    assert len(warnings_in(caplog)) == 1


def test_what_a_kill_left_goes_with_the_next_run(uri, home):
    """Of a removal, and of a run, which is told as killed."""
    begun_to_go, killed = new_outbox_folder(home), new_outbox_folder(home)
    killed.metrics.write_text('{"step":1,"time":1.5,"loss":0.5}\n')
    new_record(killed, uri)
    with begun(home, uri) as run:
        assert not begun_to_go.root.exists()
    assert not Cache(home).outbox.exists()
    client = open_store(uri)
    (other,) = [
        one
        for one in client.search_runs([read(uri, run).info.experiment_id])
        if one.info.run_name == "x"
    ]
    assert (other.info.status, other.data.metrics) == ("KILLED", {"loss": 0.5})


def test_an_earlier_run_that_cannot_be_sent_keeps_no_other_back(uri, home, monkeypatch):
    """Its numbers are gone, and that takes long; another has a last line that was torn off."""
    monkeypatch.setattr(uploader, "QUICK_SECONDS", 0.0)
    broken, torn = new_outbox_folder(home), new_outbox_folder(home)
    torn.metrics.write_text('{"step":1,"time":1.5,"loss":0.5}\n{"step":2,"ti')
    for folder in (broken, torn):
        new_record(folder, uri)
    with begun(home, uri) as run:
        wait_until(lambda: RunRecord.read(torn).is_sent("mlflow"))
    assert read(uri, run).info.status == "FINISHED"
    assert [one.root for one in unsent_runs(home)] == [broken.root]


def test_the_folder_of_a_run_that_another_process_begins_stays(uri, home):
    made = new_outbox_folder(home)
    with owner_lock(made.root, "sample"), begun(home, uri):
        pass
    assert made.private.is_dir()
    with begun(home, uri):
        assert not made.root.exists()


def test_what_is_uploaded_lies_beside_the_store_and_not_where_one_stands(home, tmp_path, new_store):
    store = Path(new_store())
    (tmp_path / "note.txt").write_text("hello")
    for experiment, folder in {"../up": "up", "..": "_"}.items():
        with begun(home, f"sqlite:///{store}", experiment=experiment) as run:
            run.log_artifact(tmp_path / "note.txt")
        kept = store.parent / "mlruns" / folder / id_of(run) / "artifacts" / "note.txt"
        assert kept.read_text() == "hello"
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "note.txt"}
    assert artifacts_beside("http://127.0.0.1:5000", "align") is None
