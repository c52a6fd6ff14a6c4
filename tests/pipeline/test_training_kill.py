"""Killed at any moment, `--resume auto` ends in the bits of a run that nobody killed."""

import os
import random
import shutil
import signal
from contextlib import suppress

import pytest

from align.stages.storage.checkpoints import choose_checkpoint
from align.stages.storage.run_folder import RunFolder
from support.patience import PATIENCE
from support.trainings import KILLED, learned, require_same

# Where a rank is killed, and what has to be there already. Six steps, a save after 2, 4 and 6.
PLACES = {
    "step.started=kill@1": 0,
    "step.before_update=kill@4": 2,
    "step.updated=kill@6": 4,
    "checkpoint.written=kill@2": 2,
    "checkpoint.before_json=kill@1": 0,
    "checkpoint.before_rename=kill@2": 2,
    "checkpoint.after_rename=kill@2": 2,
    "latest.after_rename=kill@2": 4,
    "prune.forgotten=kill@3": 6,
    "evaluation.done=kill@2": 2,
    "evaluation.done=kill@3": 6,
    "model.before_rename=kill@1": 6,
    "ending.before_rename=kill@1": 6,
    "ending.after_rename=kill@1": 6,
}
OF_ANY_RANK = ("step", "checkpoint.written")  # the rest is done by the first rank alone
AFTER_ALL_MET = "ending"  # the other ranks have done their work and need the first one no more
CHOSEN = [
    *((0, 1, f"ending.{moment}_rename=kill@1") for moment in ("before", "after")),
    *((2, 2, place) for place in ("step.before_update=kill@4", "checkpoint.written=kill@2")),
    *((3, 1, place) for place in ("checkpoint.before_rename=kill@2", "model.before_rename=kill@1")),
]
EVERY = [(stage, ranks, place) for stage in range(4) for ranks in (1, 2) for place in PLACES]
REST = [pytest.param(*case, marks=pytest.mark.long) for case in EVERY if case not in CHOSEN]


@pytest.mark.parametrize(("stage", "ranks", "place"), CHOSEN + REST)
def test_a_run_killed_anywhere_ends_in_the_same_bits(course, tmp_path, stage, ranks, place):
    run = tmp_path / "run"
    kind = ("--deepspeed", f"zero{stage}") if (stage, ranks) != (0, 1) else ()  # the default
    whole = course.whole(*kind, ranks=ranks)
    victim = ranks - 1 if place.startswith(OF_ANY_RANK) else 0
    failpoints = [place if rank == victim else "" for rank in range(ranks)]
    answers = course.start(run, *kind, ranks=ranks, failpoints=failpoints).answers()
    assert answers[victim].code == KILLED
    for survivor in (answer for answer in answers if answer.code != KILLED):
        is_done = place.startswith(AFTER_ALL_MET)
        assert survivor.code == (0 if is_done else 69), survivor
        assert ("lost another rank" in survivor.err) != is_done
        assert "Traceback" not in survivor.err
    assert step_of(run) == PLACES[place]
    resumed = course.run(run, *kind, "--resume", "auto", ranks=ranks)
    is_over = place.startswith("ending.after")
    assert ("this run is finished" in resumed.out) == is_over
    assert ("continuing after step" in resumed.err) == (bool(PLACES[place]) and not is_over)
    require_same(run, whole)
    assert names(run) == names(whole)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 10))
def test_a_run_killed_at_random_moments_again_and_again_ends_in_the_same_bits(
    course, tmp_path, seed
):
    """A checkpoint before every step by the clock, so that a kill finds all sorts of states."""
    rng, run, often = random.Random(seed), tmp_path / "run", ("--set", "train.save_minutes=1e-7")
    landed = 0
    while landed < 12:
        (process,) = course.start(run, *often, "--resume", "auto").processes
        code = process.server.wait(process.pid, rng.uniform(0.0, 1.5))
        if code is None:
            with suppress(ProcessLookupError):  # it may end before the signal comes
                os.kill(process.pid, signal.SIGKILL)
            process.server.wait(process.pid, PATIENCE)
            landed += 1
            continue
        assert code == 0, process.err.read_text()
        if rng.random() < 0.5:  # it was over: a new one is begun, or the finished one is killed
            shutil.rmtree(run)
    course.run(run, *often, "--resume", "auto")
    require_same(run, course.whole())
    assert step_of(run) == 6


def step_of(run):
    """The step of the checkpoint that the next run resumes from."""
    chosen = choose_checkpoint(RunFolder(run))
    return chosen.checkpoint.position.global_step if chosen else 0


def names(run):
    """Everything in a run's folder; the files of checkpoints are vouched for elsewhere."""
    return {str(path.relative_to(run)) for path in run.rglob("*")}


def test_a_line_of_steps_before_and_after_a_kill_is_that_of_all_of_them(course, tmp_path):
    run, lines = tmp_path / "run", ("--set", "train.log_every=5")
    # Killed after step 5, whose line is given up with it; the checkpoint of step 4 has none yet.
    (answer,) = course.start(run, *lines, failpoints=["step.started=kill@6"]).answers()
    assert answer.code == KILLED
    assert step_of(run) == 4
    course.run(run, *lines, "--resume", "auto")
    whole = learned(course.whole(*lines))
    assert [line["step"] for line in whole if "loss" in line] == [5, 6]
    assert learned(run) == whole
    one_by_one = {line["step"]: line for line in learned(course.whole()) if "loss" in line}
    mean = sum(one_by_one[step]["loss"] for step in range(1, 6)) / 5  # of as many rows each
    assert next(line["loss"] for line in whole if "loss" in line) == pytest.approx(mean)
