"""Killed at any moment, `--resume auto` ends in the bits of a run that nobody killed."""

import shutil
from itertools import count

import pytest

from align.stages.report.row_margins import read_margins
from align.stages.storage.run.run_folder import RunFolder
from support.checkpoint_saves import chosen_in
from support.refusals import require_names
from support.trainings import KILLED, require_same

ROWS = "after:fsync:_align/rows/*"
DRAFT = "before:make_folder:checkpoints/.tmp-*"
ENDINGS = ("before:rename:ending.json=kill@1", "after:rename:ending.json=kill@1")
# Where a rank is killed, and what has to be there already. Six steps, a save after 2, 4 and 6.
PLACES = {
    "before:backward=kill@1": 0,
    "after:backward=kill@6": 4,
    "before:update=kill@4": 2,
    "after:update=kill@6": 4,
    f"{DRAFT}=kill@2": 2,
    "before:save:*model_states.pt=kill@2": 2,
    "after:save:*model_states.pt=kill@2": 2,
    "before:fsync:align_checkpoint.json=kill@1": 0,
    "before:rename:checkpoints/step-*=kill@2": 2,
    "after:rename:checkpoints/step-*=kill@2": 2,
    "after:rename:checkpoints/latest=kill@2": 4,
    "before:remove_tree:.trash-*=kill@1": 6,
    f"{ROWS}=kill@2": 2,
    **dict.fromkeys((f"before:held_out=kill@{visit}" for visit in (5, 8)), 2),  # the middle one
    "after:rename:evaluations/*.csv=kill@2": 2,
    **dict.fromkeys((f"before:held_out=kill@{visit}" for visit in (9, 12)), 4),  # the last one
    "after:rename:evaluations/*.csv=kill@3": 4,
    "before:rename:model=kill@1": 6,
    **dict.fromkeys(ENDINGS, 6),  # the other ranks have done their work and need this one no more
}
# The rest is done by the first rank alone.
OF_ANY_RANK = ("before:backward", "after:backward", "before:update", "after:update", DRAFT, ROWS)
# A stage, ranks, and where they are killed, each time going on from the last. An evaluation has
# four batches; the one in the middle comes before the second save.
CHOSEN = [
    (
        *(0, 1),
        {
            # In step 1, 3, 3 again, 4, and 4 again.
            "before:backward=kill@1": 0,
            "after:backward=kill@3": 2,
            "before:update=kill@1": 2,
            "after:update=kill@2": 2,
            "after:save:*model_states.pt=kill@1": 2,
            "before:held_out=kill@1": 2,
            "before:held_out=kill@6": 4,
            **dict.fromkeys(ENDINGS, 6),
        },
    ),
    (
        *(2, 2),
        {
            "after:backward=kill@3": 2,
            "after:save:*model_states.pt=kill@1": 2,
            f"{DRAFT}=kill@2": 4,
            "before:held_out=kill@4": 4,
        },
    ),
    (
        *(3, 1),
        {
            "before:rename:checkpoints/step-*=kill@2": 2,
            f"{ROWS}=kill@1": 2,
            "before:rename:model=kill@1": 6,
        },
    ),
]
EVERY = [
    pytest.param(stage, ranks, {place: step}, marks=pytest.mark.long)
    for stage in range(4)
    for ranks in (1, 2)
    for place, step in PLACES.items()
]
LINES = ("--set", "train.log_every=5")


@pytest.mark.parametrize(("stage", "ranks", "kills"), CHOSEN + EVERY)
def test_a_run_killed_anywhere_ends_in_the_same_bits(course, tmp_path, stage, ranks, kills):
    """With one rank a line of the metrics is of five steps, of which a kill leaves some."""
    run = tmp_path / "run"
    kind = ("--deepspeed", f"zero{stage}", *(LINES if ranks == 1 else ()))
    for place, step in kills.items():
        victim = ranks - 1 if place.startswith(OF_ANY_RANK) else 0
        faults = [place if rank == victim else "" for rank in range(ranks)]
        words = (*kind, "--resume", "auto")
        answers = course.start(run, *words, ranks=ranks, faults=faults).answers()
        assert answers[victim].code == KILLED
        for survivor in (answer for answer in answers if answer.code != KILLED):
            is_done = place in ENDINGS
            assert survivor.code == (0 if is_done else 69), survivor
            assert "Traceback" not in survivor.err
        assert step_of(run) == step
    resumed = course.run(run, *kind, "--resume", "auto", ranks=ranks)
    is_over = place == ENDINGS[1]
    assert (f"after step {step}" in resumed.err) == (bool(step) and not is_over)
    whole = course.whole(*kind, ranks=ranks)
    require_same(run, whole)
    assert names(run) == names(whole)


@pytest.mark.long
@pytest.mark.parametrize(("start", "pause"), [(1, 3), (5, 7)])
def test_a_run_killed_a_little_later_each_time_loses_no_checkpoint(course, tmp_path, start, pause):
    """Before its nth change of the disk, a larger n each time, until it ends."""
    run, words, step = tmp_path / "run", ("--deepspeed", "zero0", "--resume", "auto"), 0
    for number in count(start, pause):
        (answer,) = course.start(run, *words, faults=[f"before:*=kill@{number}"]).answers()
        before, step = step, step_of(run) if run.exists() else 0
        assert before <= step
        if answer.code == 0:
            break
        assert answer.code == KILLED, answer
    assert number >= start + 5 * pause
    require_same(run, course.whole(*words))


def test_rows_of_steps_trained_again_stand_once(course, tmp_path):
    """Killed with the margins of steps 3 and 4 written, it next writes those of step 3 alone."""
    run = tmp_path / "run"
    course.ends(KILLED, run, fault=f"{ROWS}=kill@2")
    damaged = RunFolder(shutil.copytree(run, tmp_path / "damaged"))
    course.run(run, "--resume", "auto", "--save-every", 3)
    require_same(run, course.whole())
    (path,) = damaged.rows_written()
    path.write_bytes(b"{}\n" + path.read_bytes())
    require_names(course.run(damaged.root, "--resume", "auto").err, path)
    assert set(read_margins(damaged.rows)["step"]) == {3, 4, 5, 6}


def step_of(run):
    """The step of the checkpoint that the next run resumes from."""
    chosen = chosen_in(RunFolder(run))
    return chosen.state.step if chosen else 0


def names(run):
    """Everything in a run's folder; the files of checkpoints are vouched for elsewhere."""
    return {str(path.relative_to(run)) for path in run.rglob("*")}
