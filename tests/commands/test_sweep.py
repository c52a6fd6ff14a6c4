"""Many runs over one cache: which ones are made, and what is left of them."""

import html
import json
import re
from types import SimpleNamespace

import pytest

from align.pipeline.jobs.tracker_sync import sync_runs
from align.pipeline.train.run_diff import diff_runs, ranking
from align.pipeline.train.run_history import Measured, read_history
from align.pipeline.train.sweep import require_different, trials_of, varied_by
from align.pipeline.train.sweep_result import HEAD, Sweep, Trial, page_of
from align.schemas.config import Config, TrackingOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import TrainOptions
from align.stages.storage.cache import Cache
from align.stages.storage.output_folder import OutputFolder
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking.run_record import unsent_runs
from support.command import align
from support.long_runs import write_long_run
from support.mlflow_runs import open_store
from support.refusals import refuses
from support.trainings import KILLED


def sets(*settings):
    return [part for text in settings for part in ("--set", text)]


def made(folder):
    """The rows of the page in the order of their names, by the head of the table."""
    head, *rows = table_of((folder / "sweep.html").read_text())
    return sorted((dict(zip(head, row, strict=True)) for row in rows), key=lambda row: row["run"])


def test_every_combination_is_one_run():
    varied = {"method.beta": ["0.05", "0.1"], "train.lr": ["1e-6", "1e-5"]}
    trials = trials_of(["dpo", "orpo"], varied)
    dpo = [f"dpo-{beta}-{lr}" for beta in ("0.05", "0.1") for lr in ("1e-6", "1e-5")]
    assert [trial.name for trial in trials] == [*dpo, "orpo-1e-6", "orpo-1e-5"]
    assert trials[1].settings == ("train.method=dpo", "method.beta=0.05", "train.lr=1e-5")
    assert trials[5].settings == ("train.method=orpo", "train.lr=1e-5")
    mixture = "dpo:0.8 + sft:0.2"
    (trial,) = trials_of([mixture], {"method.dpo.beta": ["0.3"]})
    assert trial.name == "dpo_0.8+sft_0.2-0.3"
    assert trial.settings == (f"train.method={mixture}", "method.dpo.beta=0.3")
    with refuses(UsageError, "method.bta", "dpo, kto"):
        trials_of(["dpo", "kto"], {"method.bta": ["1"]})


def test_no_two_runs_have_one_folder():
    for methods, varied in (
        (["dpo"], {"method.beta": ["0.1", "0.1"]}),
        (["dpo:0.8+sft:0.2", "dpo:0.80+sft:0.2"], {}),
        (["dpo"], {"train.model": ["One", "one"]}),
        (["dpo"], {"train.model": ["a-b", "a"], "train.eval_cache": ["c", "b-c"]}),
    ):
        with refuses(UsageError, "train.method=dpo", *varied):
            trials_of(methods, varied)


def test_the_table_has_each_figure_before_and_after():
    before = {"loss": 0.7, "rewards/accuracies": 0.5, "rewards/margins": 0.0}
    after = {"loss": 0.6, "rewards/accuracies": 0.9, "rewards/margins": 0.2}
    trial = Trial("dpo", (), "finished", measured=Measured("training", before, after))
    figures = dict(zip(HEAD, trial.row(), strict=True))
    expected = {"loss from": 0.7, "loss to": 0.6, "acc. from": 0.5, "acc. to": 0.9}
    assert {name: float(figures[name]) for name in expected} == expected


def table_of(page):
    """The rows of the first table of a page."""
    table = page.partition('<table class="numbers">')[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in cells]


def test_the_page_has_the_best_run_first_and_says_how_many_are_left(tmp_path):
    """Of five runs two took 10 minutes each, one failed, and one was done before."""
    trials = trials_of(["dpo", "orpo"], {"method.beta": ["0.1", "0.3"], "train.lr": ["1e-5"]})
    trials += trials_of(["kto", "sft"], {})
    for at, accuracy, seconds in ((0, 0.6, 600), (2, 0.9, 600), (3, 0.7, 0)):
        moments = ({"eval/rewards/accuracies": one} for one in (0.5, accuracy))
        trials[at].measured = Measured("held out", *moments)
        trials[at].ending, trials[at].seconds = "finished", seconds
    trials[1].ending, trials[1].failure = "failed", "no"
    page = page_of(Sweep(tmp_path, trials, {}))
    columns, *rows = table_of(page)
    names = ("run", "ending", "acc. from", "acc. to", "duration")
    shown = [[row[columns.index(name)] for name in names] for row in rows]
    assert shown == [
        ["orpo-1e-5", "finished", "0.5000", "0.9000", "10 min"],
        ["kto", "finished", "0.5000", "0.7000", "-"],
        ["dpo-0.1-1e-5", "finished", "0.5000", "0.6000", "10 min"],
        ["dpo-0.3-1e-5", "failed", "-", "-", "-"],
    ]
    assert "4 of 5" in page


def test_a_chart_has_the_training_lines_of_all_runs_and_held_out_dots_over_them(tmp_path):
    trials = [Trial(name, (), "finished") for name in ("a", "b")]
    for trial, steps in zip(trials, (60, 90), strict=True):
        folder = write_long_run(tmp_path / trial.name, steps=steps)
        lines = folder.metrics.read_text().splitlines(keepends=True)
        if trial.name == "b":
            folder.metrics.write_text("".join(line for line in lines if "eval/" not in line))
    page = page_of(Sweep(tmp_path, trials, {}))
    (accuracy,) = re.findall(r"<figure><figcaption><b>Accuracy</b>.*?</figure>", page)
    drawn = re.findall(r'<polyline class="([^"]*)"', accuracy)
    assert drawn == ["c0 line", "c1 line", "c0 dots"]
    assert re.findall(r'<span class="key"><i[^>]*></i>([^<]*)', accuracy) == ["a", "b"]


@pytest.mark.parametrize(
    "texts",
    [
        ["method.beta"],
        ["=1"],
        ["method.beta="],
        ["method.beta=1,,2"],
        ["train.method=dpo,kto"],
        ["train.output=a,b"],
        ["train.lr=1,2", "train.lr=3"],
    ],
)
def test_what_is_varied_has_a_name_and_values_and_is_set_by_nothing_else(texts):
    with refuses(UsageError, texts[-1].partition("=")[0]):
        varied_by(texts)


@pytest.mark.timeout(60)
def test_a_thousand_runs_are_told_apart_at_once():
    jobs = [SimpleNamespace(config=Config(train=TrainOptions(lr=1 / n))) for n in range(1, 1001)]
    require_different(jobs)
    again = Config(train=TrainOptions(lr=1 / 2, output="again"))
    with refuses(UsageError, "align-run", "again"):
        require_different([*jobs, SimpleNamespace(config=again)])


def test_failing_runs_are_reported_and_the_others_made(journey, own_uri, tmp_path, monkeypatch):
    """Two good runs, one that learns nothing but NaN, and one that finds its folder taken."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sweep"
    OutputFolder(folder, "sweep").prepare()
    (folder / "orpo-1e30").mkdir()
    (folder / "orpo-1e30" / "notes.txt").write_text("mine")
    answer = align(
        "sweep",
        *("--method", "dpo", "--method", "orpo", "--lr", "1e-3,1e30"),
        *("--cache", journey.cache, "--output", "sweep"),
        *("--max-steps", 3, "--eval-fraction", 0.2, "--batch-size", 8),
        *sets("train.nonfinite_limit=1", f"tracking.uri={own_uri}"),
    )
    assert answer.code == 2, answer
    assert "2 of 4" in answer.err
    assert "dpo-1e30 failed" in answer.out
    rows = made(folder)
    assert [(one["run"], one["ending"]) for one in rows] == [
        ("dpo-1e-3", "finished"),
        ("dpo-1e30", "failed"),
        ("orpo-1e-3", "finished"),
        ("orpo-1e30", "failed"),
    ]
    for one in rows[::2]:
        assert one["rows"] == "held out"
        assert one["loss from"] != one["loss to"]
        assert (folder / one["run"] / "model" / "config.json").is_file()

    good = [folder / one["run"] for one in rows[::2]]
    ahead, (sentence, *_) = ranking({run.name: RunFolder(run) for run in good})
    found = diff_runs(*good).sets[""].accuracy
    assert ahead in sentence
    assert ahead == good[found.second > found.first].name
    page = (folder / "sweep.html").read_text()
    for text in (html.unescape(page), " ".join(answer.out.split())):
        assert sentence.partition(":")[0] in text

    links = set(re.findall(r'href="([^"]*)"', page))
    assert links == {f"{name}/report.html" for name in ("dpo-1e-3", "dpo-1e30", "orpo-1e-3")}

    broken = (folder / "dpo-1e30" / "report.html").read_text()
    assert "nonfinite.jsonl" in broken
    (lost,) = map(json.loads, (folder / "dpo-1e30" / "nonfinite.jsonl").read_text().splitlines())
    assert f"{lost['step'] - 1} of 3" in broken

    client = open_store(own_uri)
    runs = client.search_runs([client.get_experiment_by_name("align").experiment_id])
    (parent,) = [run for run in runs if run.data.tags["align.stage"] == "sweep"]
    children = [run for run in runs if run.data.tags["align.stage"] == "train"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.data.tags["align.sweep"] for run in (parent, *children)} == {str(folder)}
    names = {run.data.tags["align.trial"]: run.info.run_name.split(" · ") for run in children}
    model, _, data = parent.info.run_name.split(" · ")
    assert names == {trial: [model, trial, data] for trial in names}
    told = {run.data.tags["align.trial"]: run.info.status for run in children}
    assert told == {"dpo-1e-3": "FINISHED", "dpo-1e30": "FAILED", "orpo-1e-3": "FINISHED"}
    assert parent.info.status == "FAILED"
    assert parent.data.params == {"train.method": "dpo, orpo", "train.lr": "1e-3, 1e30"}
    assert "\norpo-1e30: " in parent.data.tags["align.failed"]
    assert parent.data.tags["align.ahead"] == ahead
    last = read_history(folder / ahead / "metrics.jsonl").measured().after
    assert parent.data.metrics == last
    (given,) = parent.inputs.dataset_inputs
    digest = {tag.key: tag.value for tag in given.tags}["align.digest"]
    assert digest == Cache(journey.cache).manifest().root


@pytest.fixture
def try_out(course, tmp_path):
    """Gives a sweep of two methods over the course's cache; returns its ranks' answers."""

    def give(*more, **how):
        arguments = ("--method", "dpo", "--method", "orpo", "--cache", course.cache)
        short = ["train.max_steps=2", "train.batch_size=8"]
        if "tracking.uri" not in str(more):
            short.append("tracking.mlflow=false")
        words = ("sweep", *arguments, "--output", tmp_path / "sweep", *more, *sets(*short))
        return course.server.start(*words, **how).answers()

    return give


def test_a_stopped_sweep_resumes(try_out, own_uri, tmp_path):
    """Killed as it marks its folder; asked to stop, and killed, in the step after its first run."""
    folder, tracked = tmp_path / "sweep", sets(f"tracking.uri={own_uri}")
    (killed,) = try_out(faults=["before:rename:_align/sweep=kill"])
    assert killed.code == KILLED, killed
    (draft,) = (folder / "_align").iterdir()
    (stopped,) = try_out(*tracked, faults=["before:update=term@3"])
    assert stopped.code == 143, stopped
    assert not draft.exists()
    assert [(one["run"], one["ending"]) for one in made(folder)] == [("dpo", "finished")]
    assert "1 of 2" in (folder / "sweep.html").read_text()
    assert "1 of 2" in (folder / "orpo" / "report.html").read_text()
    before = (folder / "dpo" / "metrics.jsonl").read_bytes()
    (again,) = try_out()
    assert again.code == 2, again
    assert "--resume auto" in again.err
    (killed,) = try_out(*tracked, "--resume", "auto", faults=["before:update=kill"])
    assert killed.code == KILLED, killed
    (resumed,) = try_out(*tracked, "--resume", "auto")
    assert resumed.code == 0, resumed
    assert "after step 1" in resumed.err
    assert (folder / "dpo" / "metrics.jsonl").read_bytes() == before
    assert [(one["run"], one["ending"]) for one in made(folder)] == [
        ("dpo", "finished"),
        ("orpo", "finished"),
    ]
    runs = open_store(own_uri).search_runs(["1"], order_by=["attributes.start_time"])
    statuses = [run.info.status for run in runs if run.data.tags["align.stage"] == "sweep"]
    assert statuses == ["KILLED", "KILLED", "FINISHED"]
    assert not unsent_runs(folder)


def test_ranks_that_end_at_a_failing_run_keep_what_was_done(try_out, tmp_path):
    more = ("--lr", "1e-3,1e30", *sets("train.nonfinite_limit=1", "train.max_steps=3"))
    answers = try_out(*more, ranks=2)
    assert [answer.code for answer in answers] == [6, 6], answers
    rows = [(one["run"], one["ending"]) for one in made(tmp_path / "sweep")]
    assert rows == [("dpo-1e-3", "finished"), ("dpo-1e30", "failed")]


def test_a_synced_sweep_is_nested(try_out, own_uri, tmp_path):
    """No rows are held out, so that its table is of the training rows."""
    (answer,) = try_out(*sets("tracking.uri=http://127.0.0.1:1"))
    assert answer.code == 0, answer
    assert "http://127.0.0.1:1" in answer.err
    folder = tmp_path / "sweep"
    synced = sync_runs(folder, TrackingOptions(), uri=own_uri)
    assert [one.status for one in synced] == ["FINISHED"] * 3
    parent, *trials = [open_store(own_uri).get_run(one.run_id) for one in synced]
    assert parent.data.tags["align.stage"] == "sweep"
    tags = [trial.data.tags for trial in trials]
    assert {tag["mlflow.parentRunId"] for tag in tags} == {parent.info.run_id}
    assert [tag["align.trial"] for tag in tags] == ["dpo", "orpo"]
    again = sync_runs(folder, TrackingOptions(), uri=own_uri)
    sent = [(one.run_id, one.numbers_sent) for one in again]
    assert sent == [(one.run_id, 0) for one in synced[1:]]
