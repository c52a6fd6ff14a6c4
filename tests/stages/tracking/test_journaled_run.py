"""A training and its record: what MLflow is told, and a new store that is whole or not there."""

import os
import random
import signal
import time
from collections import Counter

import pytest

from align.schemas.config import TrackingOptions
from align.schemas.errors import Interrupted
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking import journaled_run, uploader
from align.stages.tracking.journal import open_journal
from align.stages.tracking.mlflow_sqlite import make_store, sqlite_file
from align.stages.tracking.mlflow_tracker import NOTE_TAG, MlflowTracker
from align.stages.tracking.run_record import REPLACES_TAG
from support.mlflow_runs import (
    begun,
    id_of,
    key_of,
    new_record,
    open_store,
    run_of,
    stored,
    warnings_in,
)
from support.patience import PATIENCE, wait_until
from support.tracked_training import (
    begin,
    journalled,
    kill,
    learn,
    run_folder,
    sync_run,
)
from support.trainings import KILLED

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
    told = run_of(uri, id_of(run))
    assert (told.info.status, told.info.run_name) == ("FINISHED", "train")
    assert told.data.params == {"lr": "0.1", "seed": "0"}
    assert told.data.tags["changed.lr"] == "0.2"
    assert "changed.seed" not in told.data.tags
    assert told.data.tags["align.method"] == "kto"
    assert stored(uri, id_of(run)) == journalled(folder.root)
    assert len(journalled(folder.root)) == 20 * 2 + 2
    (entry,) = told.inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("pairs", "ab" * 18)
    tags = {tag.key: tag.value for tag in entry.tags}
    assert tags == {"mlflow.data.context": "training", "align.digest": "ab" * 32}
    client = open_store(uri)
    assert [item.path for item in client.list_artifacts(id_of(run))] == ["config.yaml"]
    (output,) = told.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert model.tags["align.path"] == str(folder.model)
    assert model.tags["align.cache_root"] == "cafe"
    assert model.source_run_id == id_of(run)


def test_a_model_that_learned_on_is_another_with_its_own_measures(uri, tmp_path):
    folder = run_folder(tmp_path)
    for step in (10, 20):
        run = begin(folder, uri, keep_through=step - 10 or -1)
        learn(run, range(step - 9, step + 1))
        run.log_model_link(folder.model, tags={"align.step": str(step)})
        run.log_model_link(folder.model, tags={"align.step": str(step)})
        run.finish("FINISHED")
    client, told = open_store(uri), run_of(uri, id_of(run))
    assert {one.step for one in told.outputs.model_outputs} == {10, 20}
    for made in told.outputs.model_outputs:
        model = client.get_logged_model(made.model_id)
        assert model.tags["align.step"] == str(made.step)
        assert [(one.step, one.value) for one in model.metrics] == [
            (made.step, 2 / (made.step + 1))
        ]


def test_a_run_that_goes_on_is_the_same_run_even_while_mlflow_is_left_out(uri, tmp_path, new_store):
    """It was stopped after steps 30 and 40, and saved; in another store it is whole again."""
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    first.log_params({"lr": "0.1"})
    first.describe("What it was begun for.")
    learn(first, range(1, 31))
    first.finish("KILLED")
    name = id_of(first)
    open_store(uri).set_tag(name, NOTE_TAG, "What I made of it.")
    second = begin(folder, uri, keep_through=30, run_name="another")
    second.describe("Something else.")
    wait_until(lambda: run_of(uri, name).info.status == "RUNNING")
    second.log_params({"lr": "0.3"})
    learn(second, range(31, 41))
    second.finish("KILLED")
    third = begin(folder, "", keep_through=40, mlflow=False)
    learn(third, range(41, 51))
    third.finish("FINISHED")
    assert run_of(uri, name).info.status == "KILLED"
    synced = sync_run(folder.root, TrackingOptions(uri=uri))
    assert (synced.run_id, synced.status) == (name, "FINISHED")
    told = run_of(uri, name)
    assert told.info.status == "FINISHED"
    assert (told.data.params["lr"], told.data.tags["changed.lr"]) == ("0.1", "0.3")
    assert stored(uri, name) == journalled(folder.root)
    assert REPLACES_TAG not in told.data.tags
    assert (told.info.run_name, told.data.tags[NOTE_TAG]) == ("train", "What I made of it.")

    elsewhere = f"sqlite:///{new_store()}"
    last = begin(folder, elsewhere, keep_through=50)
    last.finish("FINISHED")
    assert id_of(last) != name
    assert stored(elsewhere, id_of(last)) == journalled(folder.root)
    assert run_of(elsewhere, id_of(last)).data.tags[NOTE_TAG] == "What it was begun for."


@pytest.mark.parametrize("how", ["killed", "by a power cut"])
def test_steps_that_are_trained_again_are_in_the_same_run_as_first_measured(uri, tmp_path, how):
    """Of thirty steps twenty are in the checkpoint."""
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    learn(first, range(1, 31))
    before = journalled(folder.root)
    if how == "killed":  # once MLflow has heard all of it
        kill(first)
        assert run_of(uri, id_of(first)).info.status == "RUNNING"
    else:  # it had ended, and lost what lay after its tenth line
        first.finish("FAILED")
        kept = folder.metrics.read_text().splitlines(keepends=True)[:10]
        folder.metrics.write_text("".join(kept))
    second = begin(folder, uri, keep_through=20)
    for step in range(21, 36):
        second.log_metrics({"loss": 100.0 + step}, step=step)
    second.finish("FINISHED")
    assert id_of(second) == id_of(first)
    told = run_of(uri, id_of(second))
    assert (told.info.status, told.data.tags["align.run_key"]) == ("FINISHED", key_of(second))
    new = [("loss", step, 100.0 + step) for step in range(31, 36)]
    assert stored(uri, id_of(second)) == sorted([*before, *new])


@pytest.mark.parametrize("kept", [0, 20])
def test_steps_that_are_trained_again_by_other_settings_are_in_a_run_of_their_own(
    uri, tmp_path, kept, monkeypatch
):
    """One that was killed before its first checkpoint, and one that has another length then.

    The start that would replace it is killed as soon as the numbers are cut.
    """
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    first.log_params({"lr": "0.1"})
    learn(first, range(1, 31))
    wait_until(lambda: len(stored(uri, id_of(first))) == len(journalled(folder.root)))
    kill(first)
    replaced = key_of(first)

    def cut_and_die(*given):
        open_journal(*given).close()
        raise Interrupted(9)

    with monkeypatch.context() as dying:
        dying.setattr(journaled_run, "open_journal", cut_and_die)
        with pytest.raises(Interrupted):
            begin(folder, uri, keep_through=kept or -1, numbers="other")
    second = begin(folder, uri, keep_through=kept or -1, numbers="other")
    second.log_params({"lr": "0.3"})
    for step in range(kept + 1, 36):
        second.log_metrics({"loss": 100.0 + step}, step=step)
    second.finish("FINISHED")
    assert id_of(second) != id_of(first)
    assert stored(uri, id_of(second)) == journalled(folder.root)
    told = run_of(uri, id_of(second)).data
    assert told.tags[REPLACES_TAG] == replaced
    assert (told.params["lr"], told.tags.get("changed.lr")) == (
        ("0.1", "0.3") if kept else ("0.3", None)
    )
    assert run_of(uri, id_of(first)).info.status == "KILLED"


def test_an_address_means_the_same_from_everywhere_and_names_no_password(tmp_path):
    for uri, plain in {
        "sqlite:///mlflow.db": f"sqlite:///{tmp_path}/mlflow.db",
        "sqlite:////a/mlflow.db": "sqlite:////a/mlflow.db",
        "mlruns": f"{tmp_path}/mlruns",
        "http://me:pw@host:5000/x": "http://host:5000/x",
        "postgresql://me:pw@host/db": "postgresql://host/db",
    }.items():
        assert MlflowTracker.plain_address(uri) == plain


def test_a_training_sends_nothing_before_its_first_step_and_all_after_it(
    tmp_path, uri, monkeypatch
):
    monkeypatch.setattr(uploader, "FIRST_STEP_SECONDS", 1e6)
    run = begin(run_folder(tmp_path), uri, sends=False)
    run.log_metrics({"eval/loss": 0.5}, step=0)
    assert not id_of(run)
    run.begin_sending()
    wait_until(lambda: id_of(run) and stored(uri, id_of(run)) == [("eval/loss", 0, 0.5)])
    run.finish("FINISHED")


SEED = 14


def unsent(folder):
    """A run that no store has heard of."""
    run = RunFolder(folder)
    run.prepare()
    new_record(run, "http://nobody")
    open_journal(run.metrics).close()
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
    assert ended[("none", True)], ended


def test_processes_that_start_at_once_use_one_store(server, tmp_path):
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    words = [("mlflow-sync", unsent(tmp_path / str(number)), "--uri", uri) for number in range(3)]
    started = [server.start(*each) for each in words]
    assert [one.code for each in started for one in each.answers()] == [0, 0, 0]
    assert runs_in(uri) == 3
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mlflow.db"]


def test_a_store_that_was_made_in_the_meantime_stays(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    def build(draft):
        sqlite_file(draft).write_bytes(b"ours")
        (tmp_path / "mlflow.db").write_bytes(b"theirs")

    make_store(uri, build)
    for elsewhere in ("sqlite:///:memory:", "sqlite:///file:/a.db?uri=true", "http://host"):
        make_store(elsewhere, build)  # no file is made for it
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"mlflow.db": b"theirs"}


def test_a_file_that_is_no_store_is_left_as_it_is(tmp_path, caplog):
    (tmp_path / "mlflow.db").write_bytes(b"my letters")
    (tmp_path / "cache" / "_align").mkdir(parents=True)
    with begun(tmp_path / "cache", f"sqlite:///{tmp_path}/mlflow.db") as run:
        pass
    assert id_of(run) == ""
    assert len(warnings_in(caplog)) == 1
    assert (tmp_path / "mlflow.db").read_bytes() == b"my letters"
