"""A run goes on over fewer ranks or more: the same losses, and the same weights in the end."""

import json

import pytest

from align.stages.storage.run.run_folder import RunFolder, read_ending
from support.refusals import require_names
from support.rounding import NATS, apart
from support.stage_one import contents
from support.trainings import KILLED, distances, refused, saved

pytestmark = pytest.mark.numeric

# Eight steps without dropout, whose masks each rank draws for its own rows.
LONG = ("--max-steps", 8, "--set", "train.dropout=false", "--eval-every", 5)
FAR = {"losses": NATS, "weights": apart(8 * 1e-3)}


def part(course, run, *more, ranks, fault="", launcher=None):
    """One part of a run, from its newest checkpoint; all ranks are killed by a fault."""
    words = (*LONG, *more, "--resume", "auto")
    how = {"ranks": ranks, "faults": [fault] * ranks, "launcher": launcher}
    answers = course.start(run, *words, **how).answers()
    assert (answers[0].code == KILLED) == bool(fault), answers
    assert fault or {answer.code for answer in answers} == {0}, answers
    return answers[0]


def require_near(run, whole):
    assert all(far <= FAR[what] for what, far in distances(run, whole).items())


def test_two_ranks_then_one_then_two_end_as_two_do(course, tmp_path):
    """Left at auto, the run keeps the ZeRO stage in which two ranks began it."""
    whole, run = course.whole(*LONG, ranks=2), tmp_path / "run"
    part(course, run, ranks=2, fault="before:update=kill@5")
    # Killed within the first save after the change: the state of two ranks is cut once more.
    part(course, run, ranks=1, fault="before:rename:checkpoints/step-*=kill@1")
    assert saved(run) == (4, 2, 1)
    answer = part(course, run, ranks=1, fault="before:update=kill@4")
    assert saved(run) == (6, 1, 1)
    require_names(answer.err, "after step 4: ranks 2 → 1")
    part(course, run, ranks=2)
    require_near(run, whole)
    changes = ("after step 4: ranks 2 → 1", "after step 6: ranks 1 → 2")
    assert read_ending(RunFolder(run)).changes == changes
    before = contents(run)
    part(course, run, ranks=1)  # it is finished
    assert contents(run) == before


@pytest.mark.parametrize("preset", [pytest.param("zero2", marks=pytest.mark.long), "zero3"])
def test_fewer_ranks_resume_before_the_first_step(course, tmp_path, preset):
    """Its checkpoint holds no state of an optimizer yet."""
    words, run = ("--deepspeed", preset), tmp_path / "run"
    course.start(run, *LONG, *words, "--set", "train.max_time=0s", ranks=2).answers()
    assert saved(run)[0] == 0
    part(course, run, *words, ranks=1)
    require_near(run, course.whole(*LONG, ranks=2))


def uneven(rank, port):
    """What torchrun sets on two machines, the second of which computes with more threads."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank}
    return place | {"LOCAL_RANK": 0, "OMP_NUM_THREADS": 1 + rank}


def test_a_sharded_policy_resumes_in_other_shards(course, tmp_path):
    words = ("--deepspeed", "zero3")
    whole, run = course.whole(*LONG, ranks=2), tmp_path / "run"
    part(course, run, *words, ranks=1, fault="before:update=kill@5")
    part(course, run, *words, ranks=2, fault="before:update=kill@3", launcher=uneven)
    assert saved(run) == (6, 2, 3)
    # The second rank computes with other threads than the checkpoint was saved with.
    answer = part(course, run, *words, ranks=2, launcher=uneven)
    assert "after step 6" in answer.err
    require_near(run, whole)


@pytest.mark.long
@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["full", "lora"])
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero3"])
def test_every_stage_goes_on_in_one_rank_and_again_in_two(course, tmp_path, preset, lora):
    words = ("--deepspeed", preset, *lora, "--set", "train.weight_decay=0.1")
    whole, run = course.whole(*LONG, *words, ranks=2), tmp_path / "run"
    part(course, run, *words, ranks=2, fault="before:update=kill@5")
    part(course, run, *words, ranks=1, fault="before:update=kill@4")
    assert saved(run) == (6, 1, int(preset[-1]))
    part(course, run, *words, ranks=2)
    assert all(far <= 1e-5 for far in distances(run, whole).values())


def test_another_stage_and_another_optimizer_are_refused(course, tmp_path, broken_run):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}))
    for asked, names in (
        (path, ("deepspeed optimizer.type", "'AdamW'", "'Adam'")),
        ("zero2", ("train.deepspeed is zero2", "stage 0", "--deepspeed zero0")),
    ):
        refused(course, 4, broken_run, "--resume", "auto", "--deepspeed", asked, names=names)
