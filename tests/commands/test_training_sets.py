"""Several held-out sets: each is measured as it is alone, under a name of its own."""

import json
import re

import pyarrow.parquet as pq
import pytest
import yaml

from align import load_run
from align.pipeline.train.run_diff import diff_runs, ranking
from align.pipeline.train.run_history import read_history
from align.pipeline.train.sweep_result import HEAD, Trial
from align.stages.report.eval_table import read_answers
from align.stages.storage.cache import Cache
from align.stages.storage.run.run_folder import RunFolder, read_ending
from support.command import refusal
from support.mlflow_runs import id_on_disk, open_store, run_of, stored
from support.rounding import NATS
from support.tracked_training import logged_numbers
from support.trainings import KILLED, refused, require_same

EVERY = ("--eval-fraction", 0, "--eval-every", 2)
ROWS = {"few": 12, "rare": 20}


@pytest.fixture(scope="module")
def folders(course, world, tmp_path_factory):
    """The folders of two held-out sets; only the first is named as its set."""
    folder, rows = tmp_path_factory.mktemp("sets"), pq.read_table(world.data.paired)
    made = {"few": folder / "few", "rare": folder / "more"}
    for name, cache in made.items():
        pq.write_table(rows.slice(0, ROWS[name]), folder / f"{name}.parquet")
        words = ("--model", course.model, "--output", cache, "--no-mlflow")
        course.server.success("precompute-ref", folder / f"{name}.parquet", *words)
    return made


@pytest.fixture(scope="module")
def caches(folders):
    """The flag for each set."""
    return {
        "few": ("--eval-cache", folders["few"]),
        "rare": ("--eval-cache", f"rare={folders['rare']}"),
    }


@pytest.fixture(scope="module")
def both(course, caches, uri, tmp_path_factory):
    """A run that is measured on both sets and tracked; the first set chooses the best."""
    run = tmp_path_factory.mktemp("both") / "run"
    best = ("--set", "train.best=eval/rewards/rejected", "--keep-last", 1)
    tracked = ("--mlflow", "--set", f"tracking.uri={uri}")
    course.run(run, *EVERY, *caches["few"], *caches["rare"], *best, *tracked)
    return run


def measured(run, prefix="eval/"):
    """The held-out metrics of each step, without the beginning of their names."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    held_out = {
        line["step"]: {
            name.removeprefix(prefix): value
            for name, value in line.items()
            if name.startswith(prefix)
        }
        for line in lines
        if any(name.startswith("eval/") for name in line)
    }
    assert {*held_out} == {0, 2, 4, 6}
    return held_out


def test_each_set_has_the_numbers_that_it_has_alone(course, caches, both):
    for name, words in caches.items():
        prefix = f"eval/{name}/" if "=" in str(words[1]) else "eval/"
        alone = measured(course.whole(*EVERY, *words), prefix)
        assert measured(both, f"eval/{name}/") == alone
        assert "loss" in alone[0], "or this shows nothing"
    assert {name.split("/")[0] for name in measured(both)[0]} == {*ROWS}


def test_the_best_is_of_the_first_set_unless_another_is_named(course, caches, both, tmp_path):
    rejected = {
        step: of_step["rejected"] for step, of_step in measured(both, "eval/few/rewards/").items()
    }
    best = min((2, 4, 6), key=rejected.get)
    assert RunFolder(both).steps() == sorted({best, 6})
    settings = yaml.safe_load((both / "config.yaml").read_text())
    assert settings["train"]["best"] == "-eval/few/rewards/rejected"
    run, words = tmp_path / "run", (*EVERY, *caches["few"], *caches["rare"])
    named = ("--set", "train.best=+eval/rare/loss", "--set", "train.patience=1")
    course.run(run, *words, *named)
    ending = read_ending(RunFolder(run))
    assert (ending.step, "eval/rare/loss" in ending.reason) == (2, True)
    words = (*words, "--set", "train.best=eval/rare/los", "--set", "train.patience=1")
    assert "eval/rare/loss" in course.ends(2, tmp_path / "other", *words).err


def test_mlflow_and_the_card_know_each_number_and_its_cache(folders, both, uri):
    assert stored(uri, id_on_disk(RunFolder(both))) == logged_numbers(both)
    (made,) = run_of(uri, id_on_disk(RunFolder(both))).outputs.model_outputs
    roots = {name: Cache(cache).manifest().root for name, cache in folders.items()}
    found = {
        (one.key.split("/")[1], one.dataset_digest)
        for one in open_store(uri).get_logged_model(made.model_id).metrics
    }
    assert found == {(name, root[:36]) for name, root in roots.items()}
    card = (both / "model" / "README.md").read_text()
    assert all(f"| eval/{name}/loss | " in card for name in ROWS)


def test_the_page_and_the_tables_have_every_set(course, both):
    page = (both / "report.html").read_text()
    assert all(f"{name}/loss" in page for name in ROWS)
    samples = load_run(both).samples
    assert dict(samples.filter(step=6)["set"].value_counts().iter_rows()) == {
        name: 2 * rows for name, rows in ROWS.items()
    }
    course.server.success("report", both, "--answers", 3, "--config", both / "config.yaml")
    answered = {*read_answers(RunFolder(both).answers)["row_id"]}
    assert answered < {*samples.filter(set="few")["row_id"]}


def test_runs_are_compared_set_by_set_and_ranked_by_the_first(course, caches, both):
    other = course.whole(*EVERY, *caches["few"], *caches["rare"], ranks=2)
    assert measured(other)[0] == pytest.approx(measured(both)[0], abs=NATS)
    found = diff_runs(both, other)
    assert {name: one.accuracy.rows for name, one in found.sets.items()} == ROWS
    assert all(name in found.text() for name in ROWS)
    _, sentences = ranking({"a": RunFolder(both), "b": RunFolder(other)})
    assert re.findall(r"\b(?:12|20|32)\b", " ".join(sentences)) == ["12"]
    trial = Trial("kto", (), measured=read_history(RunFolder(both).metrics).measured())
    row = dict(zip(HEAD, trial.row(), strict=True))
    assert row["loss to"] == f"{measured(both)[6]['few/loss']:.4f}"
    rare = diff_runs(both, course.whole(*EVERY, *caches["rare"]))
    assert [*rare.sets] == ["rare"]
    alone = course.whole(*EVERY, *caches["few"])
    refusal(2, "diff", both, alone, names=(both, alone, "train.eval_cache"))


def test_a_run_resumes_with_the_same_sets_in_any_order(course, caches, tmp_path):
    run = tmp_path / "run"
    words = (*EVERY, *caches["few"], *caches["rare"])
    # Each evaluation reads 3 batches of one set and 5 of the other, each twice.
    course.ends(KILLED, run, *words, fault="before:held_out=kill@44")
    assert RunFolder(run).steps() == [2]
    resumed = (*EVERY, "--resume", "auto")
    twice = (*caches["few"], *caches["rare"], *caches["few"])
    for code, others in ((4, caches["few"]), (2, twice)):
        refused(course, code, run, *resumed, *others, names=("train.eval_cache",))
    course.run(run, *resumed, *caches["rare"], *caches["few"])
    whole = course.whole(*words)
    require_same(run, whole)


def test_a_plan_counts_the_rows_of_every_set(course, caches):
    words = ("--method", "kto", "--cache", course.cache, *caches["few"], *caches["rare"])
    assert re.search(r"\b32\b", course.server.success("plan", *words).out)
