import json
import re
import signal

import pytest

from align.schemas.checkpoint import Retention
from align.stages.storage import fs
from align.stages.storage.checkpoints import (
    add_checkpoint_metrics,
    choose_checkpoint,
    verify_checkpoint,
)
from align.stages.storage.failpoints import OF_A_RUN
from align.stages.storage.run_folder import RunFolder
from support.checkpoint_saves import JOURNAL, Ranks, content, save, train, writer
from support.made_caches import in_child, tree_of


def names(folder):
    return sorted(path.name for path in folder.checkpoints.iterdir())


def test_what_was_saved_is_what_is_chosen(prepared_run):
    assert save(prepared_run, 3, loss=0.5, odd=float("nan")).succeeded
    chosen = choose_checkpoint(prepared_run)
    position = chosen.checkpoint.position
    assert (position.global_step, position.cursor.step) == (3, 3)
    assert position.metrics == {"loss": 0.5}
    assert not chosen.set_aside
    assert (prepared_run.step(3) / "state-0.pt").read_bytes() == content(3, "state-0.pt")
    assert names(prepared_run) == ["latest", "step-00000003"]
    assert prepared_run.latest.read_text() == "step-00000003\n"


def test_ranks_save_one_checkpoint_together(prepared_run):
    told = Ranks(3).save(prepared_run, 2, [writer(2, rank) for rank in range(3)])
    assert [saved.succeeded for saved in told] == [True] * 3
    files = [file.path for file in verify_checkpoint(prepared_run.step(2)).files]
    assert files == sorted(
        path
        for rank in range(3)
        for path in (f"state-{rank}.pt", f"weights/{rank}-a.bin", f"weights/{rank}-b.bin")
    )


def full_disk(draft):
    (draft / "half").write_bytes(b"half")
    raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")


def forgetful(draft):
    return writer(2, 1)(draft)[1:]


def boastful(draft):
    return [*writer(2, 1)(draft), "never-written"]


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (full_disk, "rank 1: PytorchStreamWriter failed"),
        (forgetful, "differs from what the ranks wrote: state-1.pt"),
        (boastful, "rank 1: .*never-written"),
    ],
)
def test_a_failure_of_one_rank_reaches_all_and_leaves_nothing(prepared_run, write, said):
    Ranks(2).save(prepared_run, 1, [writer(1, rank) for rank in range(2)])
    before = tree_of(prepared_run.root)
    told = Ranks(2).save(prepared_run, 2, [writer(2), write])
    assert told[0] == told[1]
    assert re.search(said, told[0].failure)
    assert tree_of(prepared_run.root) == before
    assert choose_checkpoint(prepared_run).checkpoint.position.global_step == 1


def test_a_file_is_written_by_one_rank_only(prepared_run):
    gate = Ranks(2)
    told = gate.save(prepared_run, 2, [writer(2), lambda draft: _after(draft, "state-0.pt")])
    assert "two ranks wrote the same file" in told[1].failure


def _after(draft, name):
    while not (draft / name).exists() or not (draft / name).stat().st_size:
        pass
    return [name]


def test_the_newest_few_and_the_best_stay(prepared_run):
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5, 50: 4.0}
    for step, loss in losses.items():
        save(prepared_run, step, **{"eval/loss": loss})
    assert prepared_run.steps() == [20, 40, 50]


@pytest.mark.parametrize("sign", ["", "+", "-"])
@pytest.mark.parametrize(
    ("metric", "best"),
    [
        ("eval/loss", 20),
        ("eval/loss/dpo", 20),
        ("eval/nll/desirable", 20),
        ("kl/raw", 20),
        ("eval/rewards/rejected", 20),
        ("grad_norm", 20),
        ("eval/rewards/accuracies", 10),
        ("eval/never", None),
    ],
)
def test_a_loss_is_best_where_it_is_lowest_unless_a_sign_says_otherwise(
    prepared_run, metric, best, sign
):
    keep = Retention(keep_last=1, best=f"{sign}{metric}")
    best = best and {"": best, "+": 10, "-": 20}[sign]
    for step, value in {10: 3.0, 20: 1.0, 30: 2.0}.items():
        values = {} if best is None else {metric: value}
        save(prepared_run, step, retention=keep, **values)
    assert prepared_run.steps() == [*([best] if best else []), 30]


def test_what_is_measured_after_the_save_counts(prepared_run):
    keep = Retention(keep_last=1, best="eval/loss")
    for step, loss in {10: 1.0, 20: 3.0, 30: 2.0}.items():
        save(prepared_run, step, retention=keep, lr=0.5)
        more = {"eval/loss": loss, "eval/odd": float("nan")}
        add_checkpoint_metrics(
            prepared_run, step, more, journal=JOURNAL, run_id="run", retention=keep
        )
    assert prepared_run.steps() == [10, 30]
    assert verify_checkpoint(prepared_run.step(30)).position.metrics == {
        "lr": 0.5,
        "eval/loss": 2.0,
    }
    assert names(prepared_run) == ["latest", "step-00000010", "step-00000030"]


def test_the_first_of_equals_is_the_best(prepared_run):
    keep = Retention(keep_last=1, best="eval/loss")
    for step in (10, 20, 30, 40):
        save(prepared_run, step, retention=keep, **{"eval/loss": 1.0})
    assert prepared_run.steps() == [10, 40]


def test_later_steps_of_another_future_go_with_the_next_checkpoint(prepared_run):
    for step in (10, 20, 30):
        save(prepared_run, step, retention=Retention(keep_last=3))
    fs.publish(prepared_run.latest, b"step-00000010\n", label="latest")
    assert choose_checkpoint(prepared_run).checkpoint.position.global_step == 10
    save(prepared_run, 20, retention=Retention(keep_last=3))
    assert prepared_run.steps() == [10, 20]


@pytest.mark.parametrize("name", OF_A_RUN)
@pytest.mark.parametrize("action", ["kill", "term", "eio", "enospc"])
def test_a_run_stopped_while_it_saves_resumes_from_a_whole_checkpoint(tmp_path, name, action):
    clean = RunFolder(tmp_path / "clean")
    train(clean)
    for visit in (1,) if name.startswith("model") else (1, 2, 4):
        folder = RunFolder(tmp_path / str(visit))
        expected = {"kill": signal.SIGKILL, "term": signal.SIGTERM}.get(action, 74 << 8)
        assert in_child(lambda to=folder: train(to), f"{name}={action}@{visit}") == expected
        for path in folder.checkpoints.glob("step-*"):
            verify_checkpoint(path)
        train(folder)
        assert tree_of(clean.root).items() <= tree_of(folder.root).items()
        assert not list(folder.root.rglob(".*"))


def test_at_most_the_steps_since_the_last_save_are_lost(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert in_child(lambda: train(folder), "checkpoint.before_rename=kill@3") == signal.SIGKILL
    assert train(folder) == 4
    assert (
        in_child(lambda: train(folder, steps=10), "checkpoint.after_rename=kill") == signal.SIGKILL
    )
    assert json.loads((folder.step(10) / "align_checkpoint.json").read_bytes())
    assert train(folder, steps=10) == 8  # what `latest` names counts; 10 is made again
