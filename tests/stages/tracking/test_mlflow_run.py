import logging
import socket
import sqlite3
import subprocess
import sys

import pytest

from align import __version__
from align.schemas.config import TrackingOptions
from align.stages.tracking import mlflow_client, outbox
from align.stages.tracking.journal import NullRun
from align.stages.tracking.mlflow_run import open_run
from support.mlflow_runs import open_store

pytestmark = pytest.mark.usefixtures("no_mlflow_settings")


def begin(uri, **options):
    return open_run(TrackingOptions(uri=uri, **options), name="precompute-ref", tags={"a": "b"})


def read(uri, run):
    return open_store(uri).get_run(run.run_id)


@pytest.fixture
def tries(monkeypatch):
    """How many seconds each connection to a server was given, in order."""
    seconds, connect = [], socket.socket.connect

    def watched(connection, address):
        seconds.append(connection.gettimeout())
        return connect(connection, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    return seconds


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "align"]


def test_a_run_holds_what_was_logged(uri, tmp_path):
    run = begin(uri, experiment="mine")
    run.log_metrics({"tokens/s": 5.0, "odd@name": 1.5}, step=3)
    run.set_tags({"align.root": "cafe"})
    (tmp_path / "note.txt").write_text("hello")
    run.log_artifact(tmp_path / "note.txt")
    run.finish("FINISHED")
    stored = read(uri, run)
    assert stored.info.run_name == "precompute-ref"
    assert stored.info.status == "FINISHED"
    assert stored.data.metrics == {"tokens/s": 5.0, "odd_name": 1.5}
    wanted = {"a": "b", "align.root": "cafe", "align.version": __version__}
    assert wanted.items() <= stored.data.tags.items()
    assert {"torch.version", "transformers.version", "mlflow.user"} <= set(stored.data.tags)
    client = open_store(uri)
    assert client.get_metric_history(run.run_id, "odd_name")[0].step == 3
    assert [item.path for item in client.list_artifacts(run.run_id)] == ["note.txt"]
    assert client.get_experiment(stored.info.experiment_id).name == "mine"


def test_many_long_params_are_all_kept(uri):
    run = begin(uri)
    run.log_params({f"p{number}": "x" * 7000 for number in range(250)})
    run.finish("FINISHED")
    params = read(uri, run).data.params
    assert len(params) == 250
    assert {len(value) for value in params.values()} == {6000}


def test_a_param_that_changes_becomes_a_tag(uri, caplog):
    run = begin(uri)
    run.log_params({"batch": "64", "seed": "0"})
    run.log_params({"batch": "32", "seed": "0"})
    run.finish("FINISHED")
    stored = read(uri, run).data
    assert stored.params == {"batch": "64", "seed": "0"}
    assert stored.tags["changed.batch"] == "32"
    assert "changed.seed" not in stored.tags
    assert not warnings_in(caplog)


def test_the_data_set_has_our_digest_in_full(uri):
    run = begin(uri)
    run.log_dataset("pairs.jsonl", digest="ab" * 32, source="pairs.jsonl", context="reference")
    run.finish("FINISHED")
    (entry,) = read(uri, run).inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("pairs.jsonl", "ab" * 18)
    assert {tag.key: tag.value for tag in entry.tags} == {
        "mlflow.data.context": "reference",
        "align.digest": "ab" * 32,
    }


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_the_first_status_is_the_last(uri, status):
    run = begin(uri)
    run.finish(status)
    run.finish("FINISHED")
    assert read(uri, run).info.status == status


def test_the_config_names_the_experiment_before_the_environment(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from-env")
    names = []
    for options in ({}, {"experiment": "from-config"}):
        run = begin(uri, **options)
        experiment = read(uri, run).info.experiment_id
        names.append(open_store(uri).get_experiment(experiment).name)
    assert names == ["from-env", "from-config"]


def test_the_default_store_lies_in_the_current_folder(tmp_path):
    run = begin("")
    run.finish("FINISHED")
    assert (tmp_path / "mlflow.db").is_file()
    assert read(f"sqlite:///{tmp_path}/mlflow.db", run).info.status == "FINISHED"


def test_a_store_built_in_a_hurry_is_durable_afterwards(tmp_path):
    run = begin(f"sqlite:///{tmp_path}/new.db")
    with run._store.client._tracking_client.store.engine.connect() as connection:
        level = connection.exec_driver_sql("PRAGMA synchronous").scalar()
    assert level == 2  # FULL


def test_switched_off_means_nothing_is_recorded(tmp_path):
    run = open_run(TrackingOptions(mlflow=False), name="x", tags={})
    run.log_metrics({"a": 1.0})
    run.finish("FINISHED")
    assert isinstance(run, NullRun)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["ftp://nowhere", "http://[", "sqlite:////proc/none/x.db"])
def test_a_store_that_cannot_be_costs_one_warning(address, caplog):
    run = begin(address)
    run.log_params({"a": "b"})
    run.finish("FINISHED")
    assert run.run_id == ""
    assert len(warnings_in(caplog)) == 1


def test_a_refused_connection_costs_one_warning_and_hides_the_password(caplog, tries):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = begin(f"http://me:secret@127.0.0.1:{port}")
    run.log_metrics({"a": 1.0})
    run.finish("FAILED")
    assert tries == [5, 5]
    (warning,) = warnings_in(caplog)
    assert f"MLflow at http://***@127.0.0.1:{port} failed" in warning
    assert "secret" not in warning
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == [
        record for record in caplog.records if record.name == "align"
    ]


def test_a_server_that_never_answers_costs_one_warning_and_two_tries(caplog, tries):
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        run = begin(f"http://127.0.0.1:{silent.getsockname()[1]}")
        run.log_metrics({"a": 1.0})
        run.finish("FAILED")
    assert tries == [5, 5]
    assert len(warnings_in(caplog)) == 1


def test_the_users_own_timeout_is_kept(caplog, monkeypatch, tries):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        begin(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert tries == [1]
    assert len(warnings_in(caplog)) == 1


def test_a_store_that_dies_on_the_way_costs_one_warning(tmp_path, caplog):
    run = begin(f"sqlite:///{tmp_path}/dying.db")
    with sqlite3.connect(tmp_path / "dying.db") as database:
        database.execute("DROP TABLE metrics")
    for step in range(3):
        run.log_metrics({"a": 1.0}, step=step)
    run.finish("FINISHED")
    assert len(warnings_in(caplog)) == 1


def test_a_slow_store_is_spared_the_metrics_but_told_the_end(uri, caplog, monkeypatch):
    run = begin(uri)
    monkeypatch.setattr(outbox, "PATIENCE_SECONDS", 0.0)
    run.log_metrics({"a": 1.0})
    run.log_metrics({"a": 2.0})
    run.finish("KILLED")
    assert read(uri, run).info.status == "KILLED"
    assert read(uri, run).data.metrics == {}
    assert len(warnings_in(caplog)) == 1


def test_our_own_mistakes_are_not_swallowed(uri):
    run = begin(uri)
    with pytest.raises(TypeError):
        run._guard.call(lambda: len(5))
    run.finish("FAILED")


def test_mlflow_says_nothing_by_itself(tmp_path):
    code = f"""
from align.schemas.config import TrackingOptions
from align.stages.tracking.mlflow_run import open_run
run = open_run(TrackingOptions(uri="sqlite:///{tmp_path}/quiet.db"), name="x", tags={{}})
assert run.run_id
run.log_metrics({{"a": 1.0}})
run.finish("FINISHED")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_batches_hold_everything_once():
    assert [list(b) for b in mlflow_client._batches([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4], [5]]


def test_two_processes_may_make_one_store(tmp_path):
    code = f"""
from align.schemas.config import TrackingOptions
from align.stages.tracking.mlflow_run import open_run
run = open_run(TrackingOptions(uri="sqlite:///{tmp_path}/shared.db"), name="x", tags={{}})
run.finish("FINISHED")
print(len(run.run_id))
"""
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == ["32", "32"]


@pytest.mark.parametrize(("experiment", "folder"), [("a b", "a b"), ("../up", "up"), ("..", "_")])
def test_what_is_uploaded_lies_beside_the_store_and_not_where_one_stands(
    tmp_path, tmp_path_factory, experiment, folder
):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    run = begin(f"sqlite:///{elsewhere}/mlflow.db", experiment=experiment)
    (tmp_path / "note.txt").write_text("hello")
    run.log_artifact(tmp_path / "note.txt")
    run.finish("FINISHED")
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    kept = elsewhere / "mlruns" / folder / run.run_id / "artifacts" / "note.txt"
    assert kept.read_text() == "hello"


def test_a_store_that_is_no_sqlite_file_decides_for_itself():
    assert mlflow_client.artifacts_beside("http://127.0.0.1:5000", "align") is None
    assert mlflow_client.artifacts_beside("sqlite:///", "align") is None
