"""Killed at any moment, `--resume auto` ends in the bits of a run that nobody killed."""

import pytest

from align.stages.storage.run.run_folder import RunFolder
from support.checkpoint_saves import chosen_in
from support.trainings import KILLED, learned, require_same

ROWS = "after:rename:_align/rows/*"
ENDINGS = ("before:rename:ending.json=kill@1", "after:rename:ending.json=kill@1")
# Where a rank is killed, and what has to be there already. Six steps, a save after 2, 4 and 6.
PLACES = {
    "step.started=kill@1": 0,
    "step.started=kill@6": 4,
    "step.before_update=kill@4": 2,
    "step.updated=kill@6": 4,
    "checkpoint.written=kill@2": 2,
    "checkpoint.before_json=kill@1": 0,
    "checkpoint.before_rename=kill@2": 2,
    "checkpoint.after_rename=kill@2": 2,
    "after:rename:checkpoints/latest=kill@2": 4,
    "prune.forgotten=kill@3": 6,
    f"{ROWS}=kill@2": 2,
    **dict.fromkeys((f"evaluation.batch=kill@{visit}" for visit in (5, 8)), 2),  # the middle one
    "evaluation.done=kill@2": 2,
    **dict.fromkeys((f"evaluation.batch=kill@{visit}" for visit in (9, 12)), 4),  # the last one
    "evaluation.done=kill@3": 4,
    "model.before_rename=kill@1": 6,
    **dict.fromkeys(ENDINGS, 6),  # the other ranks have done their work and need this one no more
}
OF_ANY_RANK = ("step", "checkpoint.written", ROWS)  # the rest is done by the first rank alone
# A stage, ranks, and where they are killed, each time going on from the last.
CHOSEN = [
    (0, 1, {name: PLACES[name] for name in ("step.started=kill@6", *ENDINGS)}),
    (2, 2, {"checkpoint.written=kill@2": 2, "step.before_update=kill@4": 4}),
    # In the middle evaluation, and once it is made in the last one.
    (0, 1, {"evaluation.batch=kill@5": 2, "evaluation.batch=kill@6": 4}),
    (1, 2, {"evaluation.batch=kill@8": 2, "evaluation.batch=kill@5": 4}),
    (
        *(3, 1),
        {
            "checkpoint.before_rename=kill@2": 2,
            f"{ROWS}=kill@1": 2,
            "model.before_rename=kill@1": 6,
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
        failpoints = [place if rank == victim else "" for rank in range(ranks)]
        how = {"ranks": ranks, "failpoints": failpoints}
        answers = course.start(run, *kind, "--resume", "auto", **how).answers()
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


def test_visits_of_steps_that_were_given_up_are_not_in_the_table_of_rows(course, tmp_path):
    """Killed with the margins of steps 3 and 4 written, it next writes those of step 3 alone."""
    run = tmp_path / "run"
    (answer,) = course.start(run, failpoints=[f"{ROWS}=kill@2"]).answers()
    assert answer.code == KILLED
    course.run(run, "--resume", "auto", "--save-every", 3)
    require_same(run, course.whole())


def test_a_line_of_five_steps_has_their_mean(course):
    whole, one_by_one = (
        {line["step"]: line["loss"] for line in learned(course.whole(*more)) if "loss" in line}
        for more in (("--deepspeed", "zero0", *LINES), ())
    )
    assert [*whole] == [5, 6]
    assert whole[5] == pytest.approx(sum(one_by_one[step] for step in range(1, 6)) / 5)


def step_of(run):
    """The step of the checkpoint that the next run resumes from."""
    chosen = chosen_in(RunFolder(run))
    return chosen.state.step if chosen else 0


def names(run):
    """Everything in a run's folder; the files of checkpoints are vouched for elsewhere."""
    return {str(path.relative_to(run)) for path in run.rglob("*")}
