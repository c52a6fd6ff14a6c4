"""Many runs over one cache: which ones are made, and what is left of them."""

import json
import re

import pytest

from align.pipeline.mlflow_sync import sync_runs
from align.pipeline.run_report import read_history
from align.pipeline.trials import trials_of, varied_by
from align.schemas.config import TrackingOptions
from align.schemas.errors import UsageError
from align.stages.storage.cache_folder import CacheFolder, OutputFolder
from align.stages.storage.manifest_file import load_manifest
from support.command import align, refusal
from support.mlflow_runs import open_store
from support.trainings import KILLED


def names(methods, **varied):
    return [trial.name for trial in trials_of(methods, varied)]


def sets(*settings):
    return [part for text in settings for part in ("--set", text)]


def made(folder):
    """The rows of sweep.json."""
    return json.loads((folder / "sweep.json").read_text())


def test_every_combination_is_one_run():
    varied = {"method.beta": ["0.05", "0.1"], "train.lr": ["1e-6", "1e-5"]}
    assert names(["dpo"], **varied) == [
        "dpo-0.05-1e-6",
        "dpo-0.05-1e-5",
        "dpo-0.1-1e-6",
        "dpo-0.1-1e-5",
    ]


def test_an_option_that_a_method_does_not_have_is_left_out_for_it():
    varied = {"method.beta": ["0.05", "0.1"]}
    assert names(["dpo", "orpo"], **varied) == ["dpo-0.05", "dpo-0.1", "orpo"]
    trials = trials_of(["dpo", "orpo"], varied)
    assert trials[1].settings == ("train.method=dpo", "method.beta=0.1")
    assert trials[2].settings == ("train.method=orpo",)


def test_an_option_that_no_method_has_is_refused():
    with pytest.raises(UsageError, match=r"method\.bta: none of dpo, kto has it"):
        trials_of(["dpo", "kto"], {"method.bta": ["1"]})


def test_a_mixture_has_a_plain_folder_name_and_options_of_its_own():
    mixture = "dpo:0.8 + sft:0.2"
    (trial,) = trials_of([mixture], {"method.dpo.beta": ["0.3"]})
    assert trial.name == "dpo_0.8+sft_0.2-0.3"
    assert trial.settings == (f"train.method={mixture}", "method.dpo.beta=0.3")


@pytest.mark.parametrize(
    ("methods", "varied", "name"),
    [
        (["dpo"], {"method.beta": ["0.1", "0.1"]}, "dpo-0.1"),
        (["dpo", "dpo"], {}, "dpo"),
        (["dpo:0.8+sft:0.2", "dpo:0.80+sft:0.2"], {}, r"dpo_0.8\+sft_0.2"),
        (["dpo"], {"train.model": ["in/one", "in_one"]}, "dpo-in_one"),
        (["dpo"], {"train.model": ["One", "one"]}, "dpo-one"),
        (["dpo"], {"train.model": ["a-b", "a"], "train.eval_cache": ["c", "b-c"]}, "dpo-a-b-c"),
    ],
)
def test_no_two_runs_have_one_folder(methods, varied, name):
    with pytest.raises(UsageError, match=f"would both be the run {name}. Leave one of them out"):
        trials_of(methods, varied)


@pytest.mark.parametrize("text", ["method.beta", "=1", "method.beta=", "method.beta=1,,2"])
def test_values_to_vary_have_a_name_and_none_is_empty(text):
    with pytest.raises(UsageError, match="expected SETTING=V1,V2"):
        varied_by([text])


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["train.method=dpo,kto"], "a sweep sets it itself. Use --method"),
        (["train.output=a,b"], "a sweep sets it itself. Use --output"),
        (["train.lr=1,2", "train.lr=3"], "train.lr is varied twice"),
    ],
)
def test_nothing_to_vary_is_overridden(texts, said):
    with pytest.raises(UsageError, match=said):
        varied_by(texts)


@pytest.mark.parametrize(
    ("setting", "way"),
    [("train.output=x", "--output"), ("train.method=kto", "--method"), ("train.lr=1", "--vary")],
)
def test_no_set_is_silently_overridden(journey, tmp_path, setting, way):
    arguments = ("--method", "dpo", "--lr", "1e-6,1e-5", "--output", tmp_path / "sweep")
    said = refusal(2, "sweep", *arguments, "--cache", journey.cache, *sets(setting))
    assert f"--set {setting.partition('=')[0]}: the sweep sets it in every run. Use {way}" in said
    assert not (tmp_path / "sweep").exists()


def journal(path, *lines):
    path.write_text("".join(json.dumps({"time": 0.0, **line}) + "\n" for line in lines))
    return read_history(path).measured


def test_nothing_is_measured_after_the_beginning_of_a_run_that_was_cut(tmp_path):
    begun = {"step": 0, "eval/loss": 0.7}
    measured = journal(tmp_path / "m", begun, {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4})
    assert (measured.rows, measured.before, measured.after) == ("held out", {"eval/loss": 0.7}, {})


def test_a_run_without_held_out_rows_is_summarized_by_its_training_rows(tmp_path):
    first, last = {"step": 1, "loss": 0.5}, {"step": 3, "loss": 0.4}
    measured = journal(tmp_path / "m", first, {"step": 2, "checkpoint_failed": 1.0}, last)
    assert measured.rows == "training"
    assert (measured.before, measured.after) == ({"loss": 0.5}, {"loss": 0.4})
    assert journal(tmp_path / "m", {"step": 1, "lr": 0.5}).before == {}
    alone = journal(tmp_path / "m", first)
    assert (alone.before, alone.after) == ({"loss": 0.5}, {})


@pytest.fixture(scope="module")
def swept_folder(journey, tmp_path_factory):
    """Two good runs, one that learns nothing but NaN, and one that finds its folder taken."""
    folder = tmp_path_factory.mktemp("sweep")
    OutputFolder(folder / "sweep", "sweep").prepare()
    (folder / "sweep" / "orpo-1e30").mkdir()
    (folder / "sweep" / "orpo-1e30" / "notes.txt").write_text("mine")
    answer = align(
        "sweep",
        *("--method", "dpo", "--method", "orpo", "--lr", "1e-3,1e30"),
        *("--cache", journey.cache, "--output", folder / "sweep"),
        *sets("train.max_steps=3", "train.eval_fraction=0.2", "train.batch_size=8"),
        *sets("train.nonfinite_limit=1", f"tracking.uri=sqlite:///{folder}/mlflow.db"),
    )
    return folder, answer


def test_a_run_that_fails_is_reported_and_the_others_are_made(swept_folder):
    folder, answer = swept_folder
    assert answer.code == 2, answer
    assert "2 of 4 runs failed" in answer.err
    assert "dpo-1e30 failed: " in answer.out
    rows = made(folder / "sweep")
    assert [(one["name"], one["ending"], bool(one["failure"])) for one in rows] == [
        ("dpo-1e-3", "finished", False),
        ("dpo-1e30", "failed", True),
        ("orpo-1e-3", "finished", False),
        ("orpo-1e30", "failed", True),
    ]
    for one in rows:
        if not one["failure"]:
            assert one["rows"] == "held out"
            assert one["before"]["eval/loss"] != one["after"]["eval/loss"]
            assert (folder / "sweep" / one["name"] / "model" / "config.json").is_file()


def test_its_page_leads_to_those_of_its_runs_and_of_those_that_failed_on_their_way(swept_folder):
    folder, _ = swept_folder
    page = (folder / "sweep" / "sweep.html").read_text()
    links = set(re.findall(r'href="([^"]*)"', page))
    assert links == {f"{name}/report.html" for name in ("dpo-1e-3", "dpo-1e30", "orpo-1e-3")}
    assert all((folder / "sweep" / link).is_file() for link in links)
    assert "not finished" in (folder / "sweep" / "dpo-1e30" / "report.html").read_text()
    assert page.count("<polyline") > 10


def test_the_table_says_what_compares(swept_folder):
    _, answer = swept_folder
    assert "Losses and margins of different methods and betas do not compare; acc" in answer.out


def test_runs_are_nested_below_the_sweep(swept_folder):
    folder, _ = swept_folder
    client, parent, children = stored(f"sqlite:///{folder}/mlflow.db")
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    told = {run.data.tags["align.trial"]: run.info.status for run in children}
    assert told == {"dpo-1e-3": "FINISHED", "dpo-1e30": "FAILED", "orpo-1e-3": "FINISHED"}
    groups = {run.data.tags["align.sweep"] for run in [parent, *children]}
    assert groups == {str((folder / "sweep").resolve())}
    kept = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert kept == {"sweep.json", "sweep.txt", "sweep.html"}


def test_the_sweep_is_recorded_with_what_it_varied_and_what_failed(swept_folder, journey):
    folder, _ = swept_folder
    _, parent, _ = stored(f"sqlite:///{folder}/mlflow.db")
    assert parent.info.status == "FAILED"
    assert parent.data.tags["align.varied"] == "train.method=dpo,orpo; train.lr=1e-3,1e30"
    assert parent.data.params == {"train.method": "dpo, orpo", "train.lr": "1e-3, 1e30"}
    never_begun = parent.data.tags["align.failed"].splitlines()[1]
    assert never_begun.startswith("orpo-1e30: ")
    (given,) = parent.inputs.dataset_inputs
    digest = {tag.key: tag.value for tag in given.tags}["align.digest"]
    assert digest == load_manifest(CacheFolder(journey.cache)).root


def stored(uri):
    """A client, the one sweep that its store has, and all trainings."""
    client = open_store(uri)
    runs = client.search_runs([client.get_experiment_by_name("align").experiment_id])
    (parent,) = [run for run in runs if run.data.tags.get("align.stage") == "sweep"]
    return client, parent, [run for run in runs if run.data.tags.get("align.stage") == "train"]


def test_a_sweep_of_an_unknown_method_ends_before_anything_is_trained(journey, tmp_path):
    said = refusal(2, "sweep", "--method", "dpoo", "--cache", journey.cache)
    assert "Did you mean" in said


@pytest.mark.parametrize(
    ("varied", "said"),
    [
        ("method.beta=0.1,-1", "dpo--1: "),
        ("train.lr=1e-6,fast", "dpo-fast: --set: train.lr"),
        ("method.beta=0.1,0.10", "dpo-0.1 and dpo-0.10 would be the same run"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_trained(journey, tmp_path, varied, said):
    output = tmp_path / "sweep"
    arguments = ("--method", "dpo", "--cache", journey.cache, "--output", output)
    assert refusal(2, "sweep", *arguments, "--vary", varied).startswith(said)
    assert not output.exists()


@pytest.fixture
def try_out(course, tmp_path):
    """Gives a sweep of two methods over the course's cache; returns its ranks' answers."""

    def give(*more, **how):
        arguments = ("--method", "dpo", "--method", "orpo", "--cache", course.cache)
        arguments = (*arguments, "--output", tmp_path / "sweep", *more)
        short = ["train.max_steps=2", "train.batch_size=8"]
        if "tracking.uri" not in str(more):
            short.append("tracking.mlflow=false")
        return course.server.start("sweep", *arguments, *sets(*short), **how).answers()

    return give


def test_a_sweep_that_was_stopped_in_any_way_goes_on_where_it_stopped(try_out, tmp_path):
    """Killed as it marks its folder; asked to stop, and killed, in the step after its first run."""
    folder, uri = tmp_path / "sweep", f"sqlite:///{tmp_path}/mlflow.db"
    tracked = sets(f"tracking.uri={uri}")
    (killed,) = try_out(failpoints=["config.before_rename=kill"])
    assert killed.code == KILLED, killed
    (draft,) = (folder / "_align").iterdir()
    (stopped,) = try_out(*tracked, failpoints=["step.started=term@3"])
    assert stopped.code == 143, stopped
    assert not draft.exists()
    over = f"1 of 2 runs of the sweep in {folder} are over. Continue with the same command"
    assert over in stopped.err
    assert [(one["name"], one["ending"]) for one in made(folder)] == [("dpo", "finished")]
    before = (folder / "dpo" / "metrics.jsonl").read_bytes()
    (again,) = try_out()
    assert again.code == 2, again
    assert "dpo holds a finished run. Continue it with --resume auto" in again.err
    (killed,) = try_out(*tracked, "--resume", "auto", failpoints=["step.started=kill"])
    assert killed.code == KILLED, killed
    (resumed,) = try_out(*tracked, "--resume", "auto")
    assert resumed.code == 0, resumed
    assert "dpo is finished already and is not changed" in resumed.err
    assert "continuing after step 1" in resumed.err
    assert (folder / "dpo" / "metrics.jsonl").read_bytes() == before
    assert [(one["name"], one["ending"], one["steps"]) for one in made(folder)] == [
        ("dpo", "finished", 2),
        ("orpo", "finished", 2),
    ]
    client = open_store(uri)
    runs = client.search_runs(["1"], order_by=["attributes.start_time"])
    first, second, third = [run for run in runs if run.data.tags["align.stage"] == "sweep"]
    assert [one.info.status for one in (first, second, third)] == ["KILLED", "KILLED", "FINISHED"]
    assert third.data.tags["align.goes_on_from"] == second.info.run_id
    kept = {file.path for file in client.list_artifacts(second.info.run_id)}
    assert kept >= {"sweep.json", "sweep.txt"}
    assert not (folder / "_align" / "outbox").exists()


def test_without_held_out_rows_the_table_is_of_the_training_rows(try_out, tmp_path):
    (answer,) = try_out()
    assert answer.code == 0, answer
    (line,) = [line for line in answer.out.splitlines() if line.split()[:1] == ["dpo"]]
    assert line.split()[1:3] == ["finished", "training"]
    assert "-" not in line.split()
    assert "training: of the first and the last logged step" in answer.out
    one = made(tmp_path / "sweep")[0]
    assert f"{one['before']['loss']:.4f}" in line
    assert f"{one['after']['loss']:.4f}" in line


def test_runs_that_ran_out_of_time_do_not_count_as_done(try_out, tmp_path):
    held_out = sets("train.eval_fraction=0.2")
    (answer,) = try_out(*held_out, *sets("train.max_time=0s"))
    assert answer.code == 0, answer
    assert "dpo was stopped by train.max_time after 0 steps; the same command with" in answer.out
    for one in made(tmp_path / "sweep"):
        assert (one["ending"], one["steps"], one["after"]) == ("time", 0, {})
    (answer,) = try_out(*held_out, "--resume", "auto")
    assert [one["ending"] for one in made(tmp_path / "sweep")] == ["finished", "finished"], answer


def test_ranks_that_end_at_a_failing_run_keep_what_was_done(try_out, tmp_path):
    more = ("--lr", "1e-3,1e30", *sets("train.nonfinite_limit=1", "train.max_steps=3"))
    answers = try_out(*more, ranks=2)
    assert [answer.code for answer in answers] == [6, 6], answers
    rows = [(one["name"], one["ending"]) for one in made(tmp_path / "sweep")]
    assert rows == [("dpo-1e-3", "finished"), ("dpo-1e30", "failed")]


def test_a_sweep_that_met_no_store_is_nested_once_it_is_synced(try_out, tmp_path):
    (answer,) = try_out(*sets("tracking.uri=http://127.0.0.1:1"))
    assert answer.code == 0, answer
    assert "MLflow at http://127.0.0.1:1 failed" in answer.err
    folder, uri = tmp_path / "sweep", f"sqlite:///{tmp_path}/later.db"
    synced = sync_runs(folder, TrackingOptions(), uri=uri)
    assert [one.status for one in synced] == ["FINISHED"] * 3
    parent, *trials = [open_store(uri).get_run(one.run_id) for one in synced]
    assert parent.data.tags["align.stage"] == "sweep"
    kept = {file.path for file in open_store(uri).list_artifacts(parent.info.run_id)}
    assert kept == {"sweep.json", "sweep.txt", "sweep.html"}
    tags = [trial.data.tags for trial in trials]
    assert {tag["align.sweep"] for tag in tags} == {str(folder.resolve())}
    assert {tag["mlflow.parentRunId"] for tag in tags} == {parent.info.run_id}
    assert [tag["align.trial"] for tag in tags] == ["dpo", "orpo"]
    again = sync_runs(folder, TrackingOptions(), uri=uri)
    assert [(one.run_id, one.points_sent) for one in again] == [
        (one.run_id, 0) for one in synced[1:]
    ]
