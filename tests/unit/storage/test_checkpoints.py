"""Checkpoints: saved by all ranks or by none, kept while they are wanted, whole when chosen."""

import os

import pytest

from align.schemas.checkpoint import State
from align.schemas.errors import CorruptionError
from align.stages.storage.disk import fs
from align.stages.storage.run.checkpoints import (
    best_checkpoint,
    damage,
    read_checkpoint,
)
from align.stages.storage.run.run_folder import RECORD_NAME
from support.checkpoint_saves import (
    chosen_in,
    content,
    measure,
    save,
    save_together,
    writer,
)
from support.made_caches import tree_of

ALL = {"keep_last": 3, "best": ""}


@pytest.fixture
def saved_run(prepared_run):
    """A run with checkpoints of three steps."""
    for step in (1, 2, 3):
        save(prepared_run, step, retention=ALL)
    return prepared_run


def step_chosen(folder):
    chosen = chosen_in(folder)
    return chosen.state.step if chosen else None


def test_what_was_saved_is_what_is_chosen(prepared_run):
    assert step_chosen(prepared_run) is None
    assert not save(prepared_run, 3, loss=0.5)
    assert chosen_in(prepared_run).state == State(step=3, evaluated=True, metrics={"loss": 0.5})
    assert (prepared_run.step(3) / "state-0.pt").read_bytes() == content(3, "state-0.pt")
    assert {path.name for path in prepared_run.checkpoints.iterdir()} == {"latest", "step-00000003"}
    assert prepared_run.latest_step() == 3


def full_disk(draft):
    (draft / "half").write_bytes(b"half")
    raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")


def forgetful(draft):
    return writer(2, 1)(draft)[1:]


def boastful(draft):
    return [*writer(2, 1)(draft), "never-written"]


def greedy(draft):
    while not (draft / "state-0.pt").exists() or not (draft / "state-0.pt").stat().st_size:
        pass
    return ["state-0.pt"]


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (full_disk, ("rank 1", "data/0")),
        (forgetful, ("tmp-00000002", "state-1.pt")),
        (boastful, ("rank 1", "never-written")),
        (greedy, ("tmp-00000002",)),
    ],
)
def test_a_failure_of_one_rank_reaches_all_and_leaves_nothing(prepared_run, write, names):
    save_together(prepared_run, 1, [writer(1, rank) for rank in range(2)])
    before = tree_of(prepared_run.root)
    told = save_together(prepared_run, 2, [writer(2), write])
    assert told[0] == told[1]
    assert all(name in told[0] for name in names)
    assert tree_of(prepared_run.root) == before
    assert step_chosen(prepared_run) == 1


def test_the_best_checkpoint_is_refused_where_a_record_is_damaged(prepared_run):
    for step, loss in {10: 1.0, 20: 3.0, 30: 2.0}.items():
        save(prepared_run, step, retention=ALL, **{"eval/loss": loss})
    assert best_checkpoint(prepared_run, "eval/loss").state.step == 10
    assert best_checkpoint(prepared_run, "+eval/loss").state.step == 20
    assert best_checkpoint(prepared_run, "eval/other") is None
    (prepared_run.step(30) / RECORD_NAME).write_text("{}")  # what it measured is not known
    with pytest.raises(CorruptionError, match="step-00000030"):
        best_checkpoint(prepared_run, "+eval/loss")


LOWEST = ("eval/loss", "eval/loss/dpo", "eval/nll/desirable", "kl/raw", "eval/rewards/rejected")
BEST = dict.fromkeys((*LOWEST, "-eval/rewards/accuracies"), 20)
BEST |= {"eval/rewards/accuracies": 10, "+eval/loss": 10, "eval/never": 30}


@pytest.mark.parametrize("best", BEST)
def test_a_loss_is_best_where_it_is_lowest_unless_a_sign_says_otherwise(prepared_run, best):
    keep = {"keep_last": 1, "best": best}
    for step, value in {10: 3.0, 20: 1.0, 30: 2.0}.items():
        values = {} if best == "eval/never" else {best.lstrip("+-"): value}
        save(prepared_run, step, retention=keep, **values)
    assert prepared_run.steps() == sorted({BEST[best], 30})


def test_what_is_measured_after_the_save_counts(prepared_run):
    keep = {"keep_last": 1, "best": "eval/loss"}
    for step, loss in {10: 1.0, 20: 3.0, 30: 2.0}.items():
        save(prepared_run, step, retention=keep, lr=0.5)
        measure(prepared_run, step, keep, lr=0.5, **{"eval/loss": loss})
    assert read_checkpoint(prepared_run.step(30)).state.metrics == {"lr": 0.5, "eval/loss": 2.0}
    assert prepared_run.steps() == [10, 30]


def test_later_steps_of_another_future_go_with_the_next_checkpoint(saved_run):
    fs.publish(saved_run.latest, b"step-00000001\n")
    assert step_chosen(saved_run) == 1  # it counts before what is newer
    assert saved_run.steps() == [1, 2, 3]
    save(saved_run, 2, retention=ALL)
    assert saved_run.steps() == [1, 2]


@pytest.mark.parametrize("text", [b"", b"step-00000009\n", b"../../etc", b"step-3", b"\xff", None])
def test_a_latest_that_names_nothing_is_replaced_by_the_newest(saved_run, text, caplog):
    saved_run.latest.unlink()
    if text is not None:
        saved_run.latest.write_bytes(text)
    assert step_chosen(saved_run) == 3
    assert str(saved_run.latest) in caplog.text


DAMAGE = {
    "a cut file": lambda step: os.truncate(step / "state-0.pt", 5),
    "another byte": lambda step: (step / "state-0.pt").write_bytes(b"x" * 96),
    "a missing file": lambda step: (step / "weights" / "0-b.bin").unlink(),
    "a missing record": lambda step: (step / RECORD_NAME).unlink(),
    "a torn record": lambda step: os.truncate(step / RECORD_NAME, 40),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_an_older_one_chosen(saved_run, what, caplog):
    DAMAGE[what](saved_run.step(3))
    assert step_chosen(saved_run) == 2
    assert what == "another byte" or "step-00000003" in caplog.text  # else the caller says it
    save(saved_run, 3)  # in place of the damaged one
    assert step_chosen(saved_run) == 3
    for step in saved_run.steps():
        (saved_run.step(step) / RECORD_NAME).unlink()
    assert step_chosen(saved_run) is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_find_every_flipped_bit_together(saved_run, ranks):
    step = saved_run.step(3)
    record = read_checkpoint(step)
    every = [damage(step, record, rank, ranks) for rank in range(ranks)]
    assert every == [""] * ranks
    for file in record.files:
        path = step / file.path
        whole = path.read_bytes()
        for place in range(0, len(whole), ranks):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            found = [damage(step, record, rank, ranks) for rank in range(ranks)]
            assert [file.path in one for one in found].count(True) == 1
        path.write_bytes(whole)
