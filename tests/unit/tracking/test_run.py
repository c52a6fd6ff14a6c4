"""The record of a run: what MLflow gets of it, what waits on disk, and a store that is new."""

import errno
import json
import math
import os
import signal
import socket
from collections import Counter

import polars as pl
import pytest

from align.pipeline.jobs.tracker_sync import sync_runs
from align.schemas.config import TrackingOptions
from align.schemas.errors import CorruptionError, Interrupted, UsageError
from align.schemas.safe_text import MASK
from align.stages.storage.disk.locks import owner_lock
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking import run as tracking
from align.stages.tracking.metrics_log import MetricsLog
from align.stages.tracking.mlflow_sqlite import artifacts_beside, make_store, sqlite_file
from align.stages.tracking.mlflow_tracker import (
    KIND_TAG,
    MAX_TAG,
    NOTE_TAG,
    MlflowTracker,
    table_of,
    with_table,
)
from align.stages.tracking.run_record import (
    REPLACES_TAG,
    RunRecord,
    new_outbox_folder,
    unsent_runs,
)
from align.stages.tracking.tracker import quiet
from support import disk_faults
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
from support.refusals import refuses
from support.tracked_training import (
    begin,
    kill,
    learn,
    logged_numbers,
    run_folder,
    sync_run,
    trained_again,
)
from support.trainings import KILLED

pytestmark = pytest.mark.usefixtures("no_mlflow_settings")


@pytest.fixture(autouse=True)
def _waits_long(monkeypatch):
    """The machine may be busy."""
    for status in tracking.WAIT_SECONDS:
        monkeypatch.setitem(tracking.WAIT_SECONDS, status, 60.0)


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
    assert stored(uri, name) == logged_numbers(folder.root)
    assert REPLACES_TAG not in told.data.tags
    assert (told.info.run_name, told.data.tags[NOTE_TAG]) == ("train", "What I made of it.")

    elsewhere = new_store(tmp_path)
    last = begin(folder, elsewhere, keep_through=50)
    last.finish("FINISHED")
    assert id_of(last) != name
    assert stored(elsewhere, id_of(last)) == logged_numbers(folder.root)
    assert run_of(elsewhere, id_of(last)).data.tags[NOTE_TAG] == "What it was begun for."


@pytest.mark.parametrize("how", ["killed", "by a power cut"])
def test_steps_that_are_trained_again_are_in_the_same_run_as_first_measured(uri, tmp_path, how):
    """Of thirty steps twenty are in the checkpoint."""
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    learn(first, range(1, 31))
    before = logged_numbers(folder.root)
    if how == "killed":  # once MLflow has heard all of it
        kill(first)
        assert run_of(uri, id_of(first)).info.status == "RUNNING"
    else:  # it had ended, and lost what lay after its tenth line
        first.finish("FAILED")
        kept = folder.metrics.read_text().splitlines(keepends=True)[:10]
        folder.metrics.write_text("".join(kept))
    second = trained_again(folder, uri, range(21, 36))
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
    wait_until(lambda: id_of(first) and stored(uri, id_of(first)) == logged_numbers(folder.root))
    kill(first)
    replaced = key_of(first)

    def cut_and_die(*given):
        MetricsLog(*given).close()
        raise Interrupted(9)

    with monkeypatch.context() as dying:
        dying.setattr(tracking, "MetricsLog", cut_and_die)
        with pytest.raises(Interrupted):
            begin(folder, uri, keep_through=kept or -1, numbers="other")
    second = begin(folder, uri, keep_through=kept or -1, numbers="other")
    second.log_params({"lr": "0.3"})
    for step in range(kept + 1, 36):
        second.log_metrics({"loss": 100.0 + step}, step=step)
    second.finish("FINISHED")
    assert id_of(second) != id_of(first)
    assert stored(uri, id_of(second)) == logged_numbers(folder.root)
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


def test_no_text_of_a_record_holds_a_secret(tmp_path, uri, monkeypatch):
    secret = "canary-of-the-record"
    monkeypatch.setenv("OWN_API_KEY", secret)
    folder = run_folder(tmp_path)
    run = begin(folder, uri, sends=False, run_name=secret, experiment=secret)
    run.set_tags({"tag": secret})
    for value in (secret, f"now {secret}"):
        run.log_params({"setting": value})
    run.describe(secret)
    run.log_dataset(secret, digest="", source=secret, context="training")
    run.log_model_link(tmp_path / secret, tags={})
    run.finish("FINISHED")
    text = folder.run_record.read_text()
    assert secret not in text
    assert text.count(MASK) == 9  # the name, the experiment, and the seven texts


def test_a_training_sends_nothing_before_its_first_step_and_all_after_it(
    tmp_path, uri, monkeypatch
):
    monkeypatch.setattr(tracking, "FIRST_STEP_SECONDS", 1e6)
    run = begin(run_folder(tmp_path), uri, sends=False)
    run.log_metrics({"eval/loss": 0.5}, step=0)
    assert not id_of(run)
    run.begin_sending()
    wait_until(lambda: id_of(run) and stored(uri, id_of(run)) == [("eval/loss", 0, 0.5)])
    run.finish("FINISHED")


def unsent(folder):
    """A run that no store has heard of."""
    run = RunFolder(folder)
    run.prepare()
    new_record(run, "http://nobody")
    MetricsLog(run.metrics).close()
    return folder


def runs_in(uri):
    """How many runs a store has that is whole."""
    return len(open_store(uri).search_runs(["0", "1"]))


@pytest.mark.parametrize("kills", [1, pytest.param(90, marks=pytest.mark.long)])
def test_a_kill_leaves_a_whole_store_or_none(server, tmp_path, kills):
    """Each comes while the store is made, or a little later than the one before."""
    ended = Counter()
    for number in range(kills):
        path = tmp_path / str(number) / "mlflow.db"
        words = ("mlflow-sync", unsent(tmp_path / f"run {number}"), "--uri", f"sqlite:///{path}")
        (process,) = server.start(*words).processes
        wait_until(lambda folder=path.parent: [*folder.glob("*")])  # its draft
        if (code := server.wait(process.pid, 3 * number / kills)) is None:
            os.kill(process.pid, signal.SIGKILL)
            code = server.wait(process.pid, PATIENCE)
        ended["whole" if path.exists() else "none", code == KILLED] += 1
        assert server.run(*words).code == 0, number
        assert runs_in(f"sqlite:///{path}") == 1
    assert ended["none", True], ended


def test_processes_that_start_at_once_use_one_store(server, tmp_path):
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    words = [("mlflow-sync", unsent(tmp_path / str(number)), "--uri", uri) for number in range(2)]
    started = [server.start(*each) for each in words]
    assert [one.code for each in started for one in each.answers()] == [0, 0]
    assert runs_in(uri) == 2
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
    assert not unsent_runs(home)
    stored = run_of(uri, id_of(run))
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
        assert run_of(uri, id_of(run)).info.status == status
    with begun(home, uri) as run:
        run.finish("FAILED")
    assert run_of(uri, id_of(run)).info.status == "FAILED"


def test_the_default_store_lies_in_the_current_folder_and_is_durable(home, tmp_path, monkeypatch):
    for folder in (tmp_path / "before", tmp_path / "now"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        with begun(home, "") as run:
            pass
        made = f"sqlite:///{folder}/mlflow.db"
        assert run_of(made, id_of(run)).info.status == "FINISHED"
    with quiet("mlflow"):  # it was built in a hurry, by a process that waited for no disk
        store = MlflowTracker(made)
        with store.client._tracking_client.store.engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL


@pytest.mark.parametrize(
    "address",
    ["ftp://nowhere", "http://[", "sqlite:////proc/none/x.db", "sqlite:///letters"],
)
def test_a_store_that_cannot_be_costs_one_warning(address, home, tmp_path, caplog):
    (tmp_path / "letters").write_bytes(b"no store")
    with begun(home, address) as run:
        run.log_params({"a": "b"})
    (warning,) = warnings_in(caplog)
    assert f"align mlflow-sync {home}" in warning
    (left,) = unsent_runs(home)
    assert RunRecord.find(left).facts.params == {"a": "b"}
    assert (tmp_path / "letters").read_bytes() == b"no store"


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
        pass
    assert not begun_to_go.root.parent.exists()
    client = open_store(uri)
    (other,) = [
        one
        for one in client.search_runs([run_of(uri, id_of(run)).info.experiment_id])
        if one.info.run_name == "x"
    ]
    assert (other.info.status, other.data.metrics) == ("KILLED", {"loss": 0.5})


def test_an_earlier_run_that_cannot_be_sent_keeps_no_other_back(uri, home, monkeypatch):
    """Its numbers are gone, and that takes long; another has a last line that was torn off."""
    monkeypatch.setattr(tracking, "QUICK_SECONDS", 0.0)
    broken, torn = new_outbox_folder(home), new_outbox_folder(home)
    torn.metrics.write_text('{"step":1,"time":1.5,"loss":0.5}\n{"step":2,"ti')
    for folder in (broken, torn):
        new_record(folder, uri)
    with begun(home, uri) as run:
        wait_until(lambda: RunRecord.find(torn).is_sent("mlflow"))
    assert run_of(uri, id_of(run)).info.status == "FINISHED"
    assert [one.root for one in unsent_runs(home)] == [broken.root]


def test_all_runs_that_a_store_missed_go_with_the_next_one(uri, home, caplog):
    """So many, each from a thread of its own, would be more than SQLite takes at once."""
    for _ in range(20):
        left = new_outbox_folder(home)
        left.metrics.write_text('{"step":1,"time":1.5,"loss":0.5}\n')
        new_record(left, uri)
    with begun(home, uri):
        pass
    assert not unsent_runs(home)
    assert not warnings_in(caplog)


def test_the_folder_of_a_run_that_another_process_begins_stays(uri, home):
    made = new_outbox_folder(home)
    with owner_lock(made.root, "sample"), begun(home, uri):
        pass
    assert made.private.is_dir()
    with begun(home, uri):
        pass
    assert not made.root.exists()


def test_what_is_uploaded_lies_beside_the_store_and_not_where_one_stands(home, tmp_path, new_store):
    (tmp_path / "store").mkdir()
    store = new_store(tmp_path / "store")
    (tmp_path / "note.txt").write_text("hello")
    for experiment, folder in {"../up": "up", "..": "_"}.items():
        with begun(home, store, experiment=experiment) as run:
            run.log_artifact(tmp_path / "note.txt")
        kept = tmp_path / "store" / "mlruns" / folder / id_of(run) / "artifacts" / "note.txt"
        assert kept.read_text() == "hello"
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "note.txt", "store"}
    assert artifacts_beside("http://127.0.0.1:5000", "align") is None


def test_a_disk_that_is_full_at_the_end_of_a_run_costs_the_work_nothing(home, uri, caplog):
    is_full = []

    def refuse(op):
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(op.path))

    with disk_faults.watch(refuse):
        with begun(home, uri) as run:
            run.log_metrics({"rows": 16.0}, step=4)
            is_full.append(True)
        is_full.clear()
    assert any("metrics.jsonl" in one for one in warnings_in(caplog))
    assert not any(one.thread.is_alive() for one in run.uploaders)
    synced = sync_runs(home, TrackingOptions(uri=uri))
    assert [one.run_id for one in synced] == [id_of(run)]
    assert stored(uri, id_of(run)) == [("rows", 4, 16.0)]


def test_a_damaged_line_that_is_cut_out_shifts_no_other(uri, tmp_path):
    """All lines lay before what was sent; without the damaged one they lie elsewhere."""
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    learn(first, range(1, 11))
    first.finish("KILLED")
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    lines[3] = b"#" * (len(lines[3]) - 1) + b"\n"
    folder.metrics.write_bytes(b"".join(lines))
    second = begin(folder, uri, keep_through=10)
    learn(second, range(11, 21))
    second.finish("FINISHED")
    assert {*logged_numbers(folder.root)} <= {*stored(uri, id_of(second))}


def test_a_damaged_line_that_is_cut_out_hides_none_that_waits(uri, tmp_path):
    """Of nine lines four were sent, and one of these is damaged."""
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    learn(first, range(1, 5))
    first.finish("KILLED")
    waiting = begin(folder, "", keep_through=4, mlflow=False)
    learn(waiting, range(5, 10))
    waiting.finish("KILLED")
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    lines[1] = b"#" * (len(lines[1]) - 1) + b"\n"
    folder.metrics.write_bytes(b"".join(lines))
    last = begin(folder, uri, keep_through=9)
    last.finish("FINISHED")
    assert {*logged_numbers(folder.root)} <= {*stored(uri, id_of(last))}


def test_a_record_that_was_removed_by_hand_makes_another_run_with_all_lines(uri, tmp_path):
    """As the message about a damaged one says."""
    folder = run_folder(tmp_path)
    first = begin(folder, uri)
    learn(first, range(1, 31))
    first.finish("KILLED")
    folder.run_record.write_text("{")
    with refuses(CorruptionError, folder.run_record):
        begin(folder, uri, keep_through=30)
    folder.run_record.unlink()
    with refuses(UsageError, folder.run_record.relative_to(folder.root)):
        sync_runs(folder.root, TrackingOptions(uri=uri))
    second = begin(folder, uri, keep_through=30)
    learn(second, range(31, 36))
    second.finish("FINISHED")
    assert id_of(second) not in ("", id_of(first))
    assert stored(uri, id_of(second)) == logged_numbers(folder.root)


def test_answers_are_drawn_as_a_table_and_other_files_are_not(tmp_path):
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"after":"c","before":"b","ended":true,"prompt":"a"}\n')
    columns = ["prompt", "before", "after", "ended"]
    assert table_of(answers) == {"columns": columns, "data": [["a", "b", "c", True]]}
    table = tmp_path / "evaluations" / "step-00000001.csv"
    table.parent.mkdir()
    odd = "a\u2028b\x85c" + "w" * 140_000
    answer = {"prompt": odd, "before": "b", "after": "c"}
    pl.DataFrame([answer]).write_ndjson(answers)
    pl.DataFrame([{"prompt": odd, "logp": 0.5, "log_ratio": math.nan}]).write_csv(table)
    assert table_of(answers) == {"columns": [*answer], "data": [[*answer.values()]]}
    assert table_of(table)["data"] == [[odd, 0.5, None]]
    (tmp_path / "other.csv").write_text("a\n1\n")
    assert table_of(tmp_path / "other.csv") is None


def test_the_tag_names_each_table_once_and_the_newest_where_not_all_fit():
    tag = ""
    for step in [*range(300), 299]:
        tag = with_table(tag, f"evaluations/step-{step:08d}.json")
    assert len(tag) <= MAX_TAG
    named = [one["path"] for one in json.loads(tag)]
    assert len(set(named)) == len(named) > 20
    assert named[-1] == "evaluations/step-00000299.json"


def test_an_experiment_is_of_the_kind_that_somebody_gave_it_or_trains_models(uri, tmp_path):
    client = open_store(uri)
    client.set_experiment_tag(client.create_experiment("chats"), KIND_TAG, "genai_development")
    client.create_experiment("plain")
    kinds = {}
    for name in ("chats", "plain", "new"):
        begin(RunFolder(tmp_path / name), uri, experiment=name).finish("FINISHED")
        kinds[name] = client.get_experiment_by_name(name).tags[KIND_TAG]
    ours = "custom_model_development"
    assert kinds == {"chats": "genai_development", "plain": ours, "new": ours}
