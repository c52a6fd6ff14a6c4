"""A new SQLite store is whole or not there, whoever makes it and whatever kills him."""

import random
import shutil
import sqlite3
from contextlib import closing

import pytest

from align.stages.tracking.mlflow_client import make_store, sqlite_file
from support.mlflow_runs import begun, open_store
from support.store_makers import store_makers

SEED = 14
KILLED = -9


@pytest.fixture(scope="module")
def ask():
    with store_makers() as ask:
        yield ask


def runs_in(uri):
    """How many runs a store has that is whole."""
    return len(open_store(uri).search_runs(["0", "1"]))


@pytest.mark.parametrize("kills", [3, pytest.param(90, marks=pytest.mark.long)])
def test_a_kill_leaves_a_whole_store_or_none(ask, tmp_path, kills):
    chance = random.Random(SEED)
    span = ask(uri=f"sqlite:///{tmp_path}/mlflow.db", makers=1)["seconds"]
    ended = {"none": 0, "whole": 0}
    for number in range(kills):
        path = tmp_path / str(number) / "mlflow.db"
        path.parent.mkdir()
        uri = f"sqlite:///{path}"
        moment = (number + chance.random()) / kills * span
        answer = ask(uri=uri, makers=1, kill_after=moment)
        ended["whole" if path.exists() else "none"] += answer["codes"] == [KILLED]
        before = runs_in(uri) if path.exists() else 0
        again = ask(uri=uri, makers=1)
        assert again["codes"] == [0], (SEED, number)
        if not before:
            span = again["seconds"]  # as long as it takes now: others use the machine as well
        assert runs_in(uri) == before + 1
        assert not list(path.parent.glob(".mlflow.db.*")), "drafts are removed by the next"
    assert ended["none"], ended


def test_processes_that_start_at_once_use_one_store(ask, tmp_path):
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    assert ask(uri=uri, makers=4)["codes"] == [0, 0, 0, 0]
    assert runs_in(uri) == 4
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mlflow.db"]


def test_a_store_that_was_made_in_the_meantime_stays(tmp_path):
    """By somebody who knows nothing of our lock."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    def build(draft):
        sqlite_file(draft).write_bytes(b"ours")
        (tmp_path / "mlflow.db").write_bytes(b"theirs")

    make_store(uri, build)
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
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "align"]
    return warning


def test_a_half_made_store_is_named_with_what_to_do(tmp_path, new_store, caplog):
    store = new_store()
    said = warning_of(caplog, tmp_path, half_made(store))
    assert f"{store} is not a whole store of this MLflow" in said
    assert "holds no run and was left half made" in said
    assert "remove it" in said


def test_an_older_store_with_runs_is_never_said_to_be_removed(tmp_path, new_store, caplog):
    store = new_store()
    with begun(tmp_path / "cache", f"sqlite:///{store}"):
        pass
    uri = half_made(shutil.copy(store, tmp_path / "mlflow.db"))  # one that nothing has opened
    said = warning_of(caplog, tmp_path, uri)
    assert "It holds 1 runs of another version of MLflow" in said
    assert f"`mlflow db upgrade {uri}`" in said
    assert "remove" not in said


def test_a_file_that_is_no_store_is_left_as_it_is(tmp_path, caplog):
    (tmp_path / "mlflow.db").write_bytes(b"my letters")
    warning_of(caplog, tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    assert (tmp_path / "mlflow.db").read_bytes() == b"my letters"


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("sqlite:///mlflow.db", "mlflow.db"),
        ("sqlite:////a/b.db?timeout=5", "/a/b.db"),
        ("sqlite+pysqlite:////a/b.db", "/a/b.db"),
        ("sqlite:///:memory:", None),
        ("sqlite:///file:/a.db?uri=true", None),
        ("sqlite://", None),
        ("http://host", None),
        ("mlruns", None),
    ],
)
def test_a_sqlite_address_names_its_file(uri, path):
    found = sqlite_file(uri)
    assert (str(found) if found else None) == path
