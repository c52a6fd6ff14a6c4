"""A run that ends early, and the model of the best checkpoint: the same after any stop."""

import json
import re

import pytest

from align.stages.storage.run.run_folder import RunFolder, read_ending
from support.refusals import require_names
from support.trainings import KILLED, learned, require_same, weights

RESUME = ("--resume", "auto")
# A metric that is best where the loss is highest gets worse as the run learns.
WORSE = ("--eval-every", 1, "--set", "train.best=+eval/loss")


def patient(times):
    return (*WORSE, "--set", f"train.patience={times}")


def losses(run):
    """The loss of the held-out rows by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}


def ending_of(run):
    return read_ending(RunFolder(run))


@pytest.fixture(scope="module")
def endless(course):
    """All six steps, each measured."""
    run = course.whole(*WORSE)
    found = losses(run)
    assert max(found, key=found.get) == 0, "or patience ends at other steps"
    return run


# Three evaluations that are no better than the first: killed before, in and after the third.
KILLS = {
    1: (
        "after:update=kill@2",
        "after:rename:evaluations/*.csv=kill@4",
        "before:rename:checkpoints/step-*=kill@1",
        "before:held_out=kill@4",
        "before:rename:ending.json=kill@1",
    ),
    2: ("before:held_out=kill@4", "before:rename:ending.json=kill@1"),
}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_ends_at_the_same_step_wherever_it_is_killed(course, endless, tmp_path, ranks):
    run, words = tmp_path / "run", (*patient(3), *RESUME)
    whole = course.whole(*patient(3), ranks=ranks)
    ended = ending_of(whole)
    assert (ended.ending, ended.step, ended.total_steps) == ("finished", 3, 6)
    for place in KILLS[ranks]:
        answers = course.start(run, *words, ranks=ranks, faults=[place]).answers()
        assert answers[0].code == KILLED, (place, answers)
    last = course.run(run, *words, ranks=ranks)
    require_same(run, whole)
    assert ending_of(run).reason == ended.reason
    require_names(ended.reason, 3, "eval/loss")
    assert ended.reason in last.out
    assert ended.reason.replace("+", "&#43;") in (run / "report.html").read_text()
    if ranks == 1:
        assert learned(run) == learned(endless)[: len(learned(run))]


def test_more_patience_goes_on_as_if_it_had_been_there_from_the_start(course, endless, tmp_path):
    run = tmp_path / "run"
    course.run(run, *patient(1))
    assert ending_of(run).step == 1
    course.run(run, *patient(1), *RESUME)
    assert ending_of(run).step == 1
    more = course.run(run, *patient(3), *RESUME)
    assert "train.patience: " in more.err
    require_same(run, course.whole(*patient(3)))
    course.run(run, *patient(2), *RESUME)  # it has gone on for too long already
    require_same(run, course.whole(*patient(3)))
    course.run(run, *WORSE, *RESUME)
    require_same(run, endless)
    assert ending_of(run).reason == ""


def test_the_model_of_the_best_checkpoint_is_written(course, tmp_path):
    """Of steps 2, 4 and 6 the loss is highest after step 2, where a run of patience 1 ends."""
    run, two = tmp_path / "run", ("--eval-every", 2, "--set", "train.best=+eval/loss")
    best = ("--set", "train.write_best=true")
    first = course.whole(*two, "--set", "train.patience=1")
    assert ending_of(first).step == 2
    course.ends(KILLED, run, *two, *best, fault="before:rename:model=kill@1")
    told = course.run(run, *two, *best, *RESUME).err
    steps = {*re.findall(r"step (\d+)\b", told)}
    assert {"2", "0"} <= steps  # 0 is better yet, and has no checkpoint
    found = losses(run)
    assert max((2, 4, 6), key=found.get) == 2, "or this shows nothing"
    assert weights(run) == weights(first)
    assert (ending_of(run).step, ending_of(run).model_step) == (6, 2)
    assert f"{found[2]:.6g}" in (run / "model" / "README.md").read_text()

    course.run(run, *two, *RESUME)  # asked for the last step's after all
    assert ending_of(run).model_step is None
    require_same(run, course.whole(*two))
    course.run(run, *two, *best, *RESUME, ranks=2)
    assert weights(run) == weights(first)


def test_a_metric_that_is_never_measured_ends_the_run_at_once(course, tmp_path):
    run = tmp_path / "run"
    words = ("--eval-every", 2, "--set", "train.best=eval/los", "--set", "train.patience=2")
    answer = course.ends(2, run, *words)
    require_names(answer.err, "eval/los ", "'eval/loss'")


def test_a_metric_that_only_keeps_a_checkpoint_may_change(course, endless):
    trained = weights(endless)
    course.run(endless, "--eval-every", 1, "--set", "train.best=eval/nll", *RESUME)
    assert weights(endless) == trained
