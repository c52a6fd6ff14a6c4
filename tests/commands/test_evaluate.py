"""`align evaluate`: its numbers are those of the training's own evaluation, to the last digit."""

import json
import os
import shutil
import sys
from itertools import pairwise

import pytest

from align.stages.storage.run.run_folder import RunFolder
from support.command import refusal, success
from support.mlflow_runs import id_on_disk, stored
from support.refusals import require_names
from support.tracked_training import logged_numbers

LORA = ("--lora", "--lora-rank", 2, "--dtype", "bfloat16")
PLAIN = ("--set", "train.row_margins=false")
BEST = ("--eval-every", 2, "--set", "train.best=eval/nll", "--set", "train.write_best=true")


def evaluation_of(run, step=6):
    """The metrics of the evaluation after a step, by their names in a set."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = {
        name.removeprefix("eval/"): value
        for line in lines
        for name, value in line.items()
        if line["step"] == step and name.startswith("eval/")
    }
    assert "loss" in found
    return found


def measured(course, *words):
    """The metrics that a command prints, by the names of sets."""
    results = json.loads(course.server.success("evaluate", *words, "--json").out)
    return {name: one["metrics"] for name, one in results["sets"].items()}


@pytest.fixture(scope="module")
def elsewhere(course):
    """A run that is measured on another cache, and the cache."""
    cache = course.folder / "elsewhere"
    shutil.copytree(course.cache, cache)
    return course.whole("--eval-fraction", 0, "--eval-cache", cache), cache


@pytest.mark.parametrize(
    "words",
    [(), ("--dtype", "bfloat16"), LORA, ("--method", "bco"), ("--method", "reward", *LORA, *PLAIN)],
    ids=lambda words: " ".join(map(str, words[:3])),
)
def test_a_run_is_measured_as_it_was_trained(course, words):
    run = course.whole(*words)
    assert measured(course, run) == {"held-out": evaluation_of(run)}


def test_a_cache_is_measured_as_by_train_eval_cache_and_keeps_the_results_of_others(
    course, elsewhere
):
    run, cache = elsewhere
    expected = evaluation_of(run)
    assert measured(course, run) == {"elsewhere": expected}
    again = measured(course, run, "--cache", f"again={cache}")
    assert again == {"elsewhere": expected, "again": expected}
    page = (run / "report.html").read_text()
    assert "again: loss" in page
    answer = course.server.run("evaluate", run, "--beta", 0.5)
    assert answer.code == 4
    require_names(answer.err, "method.beta")


def test_any_model_is_measured_against_the_reference(course, elsewhere, tmp_path):
    run, cache = elsewhere
    # Of one batch size, because the last digits follow the order of sums.
    words = ("--cache", cache, "--method", "kto", "--set", "train.batch_size=4")
    for model, step in ((course.model, 0), (run / "model", 6)):
        folder = tmp_path / str(step)
        found = measured(course, model, *words, "--output", folder)
        assert found == {"elsewhere": evaluation_of(run, step)}
    before = (folder / "results.json").read_bytes()
    again = course.server.run("evaluate", course.model, *words, "--output", folder)
    assert (again.code, (folder / "results.json").read_bytes()) == (2, before)
    other = shutil.copytree(course.model, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    assert course.server.run("evaluate", other, *words).code == 4


def test_the_rows_are_those_that_are_measured(course, elsewhere, tmp_path):
    _, cache = elsewhere
    few = ("--set", "train.batch_size=4", "--set", "train.limit_eval_batches=1")
    words = (course.model, "--cache", cache, "--method", "dpo", *few, "--output", tmp_path / "few")
    answer = course.server.success("evaluate", *words, "--json")
    (found,) = json.loads(answer.out)["sets"].values()
    rows = (tmp_path / "few" / "rows.csv").read_text().splitlines()
    assert (found["rows"], len(rows)) == (4, 1 + 2 * 4)


def test_the_interval_is_of_the_rows_of_the_table(course):
    run = course.whole()
    answer = course.server.success("evaluate", run, "--json")
    (found,) = json.loads(answer.out)["sets"].values()
    rows = (run / "evaluated" / "rows.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * found["rows"]
    names = {f"rewards/{one}" for one in ("accuracies", "margins", "chosen", "rejected")}
    assert {*found["intervals"]} == names
    for name, (low, high) in found["intervals"].items():
        assert low < found["metrics"][name] < high


def test_two_ranks_measure_the_same(course):
    run = course.whole("--method", "dpo")
    answers = course.server.start("evaluate", run, ranks=2).answers()
    assert [one.code for one in answers] == [0, 0], answers
    (found,) = json.loads((run / "evaluated" / "results.json").read_text())["sets"].values()
    assert found["metrics"] == pytest.approx(evaluation_of(run), abs=1e-9)
    assert not answers[1].out


def test_the_results_of_a_run_are_in_its_card_and_its_trackers_once(course, uri, tmp_path):
    run = tmp_path / "run"
    words = ("--mlflow", "--set", f"tracking.uri={uri}")
    course.run(run, *words)
    for _ in range(2):
        course.server.success("evaluate", run, "--config", run / "config.yaml")
    card = (run / "model" / "README.md").read_text()
    assert card.count("| held-out: loss | ") == card.count("## Evaluation") == 1
    assert "## Versions" in card
    sent = stored(uri, id_on_disk(RunFolder(run)))
    assert sent == logged_numbers(run)
    assert any(name == "evaluate/held-out/loss" for name, *_ in sent)
    course.run(run, *words, "--max-steps", 7, "--resume", "auto")
    assert "held-out: loss" not in (run / "report.html").read_text()


HARNESS = """
import json, os, sys
words = sys.argv[1:]
if "broken" in words:
    raise SystemExit("no such task: broken")
path = words[words.index("--output_path") + 1]
values = {"name": "tiny", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 1, "words": words}
values |= {"f1_stderr,strict": float("nan")}
with open(path.replace(".json", "_2026.json"), "w") as file:
    json.dump({"results": {"tiny": values}}, file)
"""


def test_tasks_are_measured_by_the_harness(world, tmp_path, monkeypatch):
    """A stand-in with the real one's files; tests/peers runs the real one."""
    package = tmp_path / "packages" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(HARNESS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (package.parent, *sys.path))))
    words = ("--tasks", "tiny", "--harness", "--num_fewshot 2", "--device", "cpu", "--json")
    results = json.loads(success("evaluate", world.model, *words).out)
    assert results["tasks"]["tiny"] == {
        "metrics": {"acc": 0.5, "acc_stderr": 0.1, "f1,strict": 1},
        "intervals": {},
    }
    (file,) = (tmp_path / "align-evaluation").glob("lm_eval_*.json")
    given = json.loads(file.read_text())["results"]["tiny"]["words"]
    pairs = {*pairwise(given)}
    model = f"pretrained={world.model.absolute()},dtype=auto"
    assert {("--num_fewshot", "2"), ("--model_args", model), ("--device", "cpu")} <= pairs
    broken = ("evaluate", world.model, "--tasks", "broken", "--output", tmp_path / "other")
    refusal(2, *broken, names=("no such task: broken",))
    assert not (tmp_path / "other" / "results.json").exists()
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refusal(2, *broken, names=("align-cached-reference[evaluate]",))


def test_tasks_of_a_reward_model_are_refused(course):
    """The harness would give it a random output layer, and numbers of that."""
    run = course.whole("--method", "reward", *LORA, *PLAIN)
    for subject in (run, run / "model"):
        answer = course.server.run("evaluate", subject, "--tasks", "hellaswag")
        assert answer.code == 2
        require_names(answer.err, run / "model", "--tasks")
    assert not (run / "evaluated" / "lm_eval.log").exists()
