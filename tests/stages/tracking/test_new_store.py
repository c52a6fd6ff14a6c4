"""A new SQLite store is whole or not there, whoever makes it and whatever kills him."""

import os
import random
import shutil
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing

import pytest

from align.stages.storage.run_folder import RunFolder
from align.stages.tracking.journal import open_journal
from align.stages.tracking.mlflow_client import make_store, sqlite_file
from align.stages.tracking.outbox import open_ledger
from support.mlflow_runs import begun, open_store, warnings_in
from support.patience import PATIENCE
from support.trainings import KILLED

SEED = 14


def unsent(folder):
    """A run that no store has heard of."""
    run = RunFolder(folder)
    run.prepare()
    open_ledger(run.mlflow, uri="http://nobody", experiment="align", run_name="x")
    open_journal(run.metrics, keep_through=-1).close()
    return folder


def runs_in(uri):
    """How many runs a store has that is whole."""
    return len(open_store(uri).search_runs(["0", "1"]))


@pytest.mark.parametrize("kills", [2, pytest.param(90, marks=pytest.mark.long)])
def test_a_kill_leaves_a_whole_store_or_none(server, tmp_path, kills):
    chance, ended, span = random.Random(SEED), Counter(), 1.0
    for number in range(-1, kills):
        path = tmp_path / str(number) / "mlflow.db"
        words = ("mlflow-sync", unsent(tmp_path / f"run {number}"), "--uri", f"sqlite:///{path}")
        if number >= 0:  # before, it is seen how long it takes
            (process,) = server.start(*words).processes
            code = server.wait(process.pid, (number + chance.random()) / kills * span)
            if code is None:
                os.kill(process.pid, signal.SIGKILL)
                code = server.wait(process.pid, PATIENCE)
            ended[("whole" if path.exists() else "none", code == KILLED)] += 1
        begins = time.monotonic()
        assert server.run(*words).code == 0, (SEED, number)
        if not ended[("whole", True)] or number < 0:
            span = time.monotonic() - begins  # others use the machine as well
        assert runs_in(f"sqlite:///{path}") == 1
        assert [one.name for one in path.parent.iterdir()] == ["mlflow.db"], "no draft is left"
    assert ended[("none", True)], ended


def test_processes_that_start_at_once_use_one_store(server, tmp_path):
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    words = [("mlflow-sync", unsent(tmp_path / str(number)), "--uri", uri) for number in range(3)]
    started = [server.start(*each) for each in words]
    assert [one.code for each in started for one in each.answers()] == [0, 0, 0]
    assert runs_in(uri) == 3
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mlflow.db"]


def test_a_store_that_was_made_in_the_meantime_stays(tmp_path):
    """By somebody who knows nothing of our lock."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    def build(draft):
        sqlite_file(draft).write_bytes(b"ours")
        (tmp_path / "mlflow.db").write_bytes(b"theirs")

    make_store(uri, build)
    for elsewhere in ("sqlite:///:memory:", "sqlite:///file:/a.db?uri=true", "http://host"):
        make_store(elsewhere, build)  # no file is made for it
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"mlflow.db": b"theirs"}


def half_made(path):
    """Makes of a store what a kill left that built it where it lies; MLflow never saw it."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
    return f"sqlite:///{path}"


def warning_of(caplog, home, uri):
    with begun(home / "cache", uri) as run:
        pass
    assert run.run_id == ""
    (warning,) = warnings_in(caplog)
    return warning


def test_a_half_made_store_is_named_with_what_to_do(tmp_path, new_store, caplog):
    store = new_store()
    said = warning_of(caplog, tmp_path, half_made(store))
    assert f"{store} is not a whole store of this MLflow" in said
    assert "remove it" in said


def test_an_older_store_with_runs_is_never_said_to_be_removed(tmp_path, new_store, caplog):
    store = new_store()
    with begun(tmp_path / "cache", f"sqlite:///{store}"):
        pass
    uri = half_made(shutil.copy(store, tmp_path / "mlflow.db"))  # one that nothing has opened
    said = warning_of(caplog, tmp_path, uri)
    assert f"`mlflow db upgrade {uri}`" in said
    assert "remove" not in said


def test_a_file_that_is_no_store_is_left_as_it_is(tmp_path, caplog):
    (tmp_path / "mlflow.db").write_bytes(b"my letters")
    warning_of(caplog, tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    assert (tmp_path / "mlflow.db").read_bytes() == b"my letters"
