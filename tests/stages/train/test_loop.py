"""When the loop tells, measures, saves and ends."""

import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from align.schemas.batches import Cursor
from align.schemas.rows import Role
from align.stages.train import evaluation as evaluation_module
from align.stages.train import throughput
from align.stages.train.loop import Place, train
from align.stages.train.synchronized import StopConditions
from support.training_world import START, Recorded, job_of, learn, loop_of, session_of

HELD_OUT = {"eval_fraction": 0.3}


def run(
    training_world,
    here,
    *,
    start=START,
    conditions=None,
    is_measured=False,
    recorded=None,
    **settings,
):
    """Three steps an epoch, two epochs unless set otherwise."""
    settings = {"limit_train_batches": 3, **settings}
    session = session_of(job_of(training_world.pairs, "dpo", **settings), here)
    recorded, conditions = (
        recorded or Recorded(),
        conditions or StopConditions(lambda: False, math.inf),
    )
    how = {"start": start, "conditions": conditions, "is_measured": is_measured}
    place, ending = train(loop_of(session), records=recorded, **how)
    return recorded, place, ending


def steps(recorded):
    return [step for step, _ in recorded]


def test_everything_has_its_own_rhythm_and_is_done_at_the_end(training_world, one_rank):
    rhythm = {"log_every": 2, "eval_every": 3, "save_every": 4, "max_steps": 5}
    recorded, place, ending = run(training_world, one_rank, **rhythm, **HELD_OUT)
    assert steps(recorded.steps) == [2, 4, 5]
    assert steps(recorded.evaluations) == [0, 3, 5]
    assert recorded.saves == [4, 5]
    assert (place, ending) == (Place(5, Cursor(1, 2)), "finished")


def test_what_falls_on_the_last_step_is_done_once(training_world, one_rank):
    rhythm = {"log_every": 2, "eval_every": 2, "save_every": 2, "max_steps": 4}
    recorded, _, _ = run(training_world, one_rank, **rhythm, **HELD_OUT)
    assert steps(recorded.steps) == [2, 4]
    assert steps(recorded.evaluations) == [0, 2, 4]
    assert recorded.saves == [2, 4]


@pytest.mark.parametrize(("most", "last"), [(0, 6), (4, 4), (100, 6)])
def test_it_ends_with_the_epochs_or_before_if_set(training_world, one_rank, most, last):
    recorded, place, _ = run(training_world, one_rank, max_steps=most)
    assert place.step == steps(recorded.steps)[-1] == last
    assert recorded.saves == [last]
    assert recorded.evaluations == []  # nothing is held out
    assert [metrics["epoch"] for _, metrics in recorded.steps] == pytest.approx(
        [step / 3 for step in range(1, last + 1)]
    )


def test_a_run_that_goes_on_measures_no_beginning(training_world, one_rank):
    recorded, place, _ = run(training_world, one_rank, start=Place(4, Cursor(1, 1)), **HELD_OUT)
    assert steps(recorded.steps) == [5, 6]
    assert steps(recorded.evaluations) == [6]
    assert place == Place(6, Cursor(2, 0))


def test_a_run_that_was_over_is_only_saved(training_world, one_rank):
    over = {"start": Place(6, Cursor(2, 0)), "is_measured": True}
    recorded, _, ending = run(training_world, one_rank, **over, **HELD_OUT)
    assert (recorded.steps, recorded.evaluations, recorded.saves, ending) == (
        [],
        [],
        [6],
        "finished",
    )


@pytest.mark.parametrize("step", [0, 3, 6])
def test_an_evaluation_that_was_due_and_never_ended_is_made_first(training_world, one_rank, step):
    """Step 3 is due by eval_every, the others as the first and the last."""
    begun = {"start": Place(step, Cursor(step // 3, 0)), "eval_every": 3}
    recorded, _, _ = run(training_world, one_rank, **begun, **HELD_OUT)
    assert steps(recorded.evaluations) == [at for at in (0, 3, 6) if at >= step]
    recorded, _, _ = run(training_world, one_rank, is_measured=True, **begun, **HELD_OUT)
    assert steps(recorded.evaluations) == [at for at in (0, 3, 6) if at > step]


class InOrder(Recorded):
    """Writes down what came before what, and fails in the evaluation of a step."""

    def __init__(self, fails_at):
        super().__init__()
        self.order, self.fails_at = [], fails_at

    def evaluated(self, place, metrics, samples):
        if place.step == self.fails_at:
            raise ZeroDivisionError
        self.order.append(("evaluated", place.step))

    def save(self, place):
        self.order.append(("saved", place.step))


def test_a_step_is_saved_before_it_is_measured(training_world, one_rank):
    """So that a last evaluation that fails costs nothing but itself."""
    recorded = InOrder(fails_at=6)
    with pytest.raises(ZeroDivisionError):
        run(training_world, one_rank, recorded=recorded, save_every=3, eval_every=3, **HELD_OUT)
    assert recorded.order == [("evaluated", 0), ("saved", 3), ("evaluated", 3), ("saved", 6)]


@pytest.mark.parametrize("before", [0, 3, 6])
def test_an_evaluation_is_stopped_between_two_batches(
    training_world, one_rank, monkeypatch, before
):
    """Somebody asks in the first batch of the evaluation after that many steps."""
    recorded, batches = Recorded(), []

    def note(name):
        if name == "evaluation.batch" and len(recorded.steps) == before:
            batches.append(name)

    monkeypatch.setattr(evaluation_module, "reach", note)
    conditions = StopConditions(lambda: bool(batches), math.inf)
    _, place, ending = run(
        training_world,
        one_rank,
        recorded=recorded,
        conditions=conditions,
        eval_every=3,
        batch_size=2,
        **HELD_OUT,
    )
    assert (place.step, ending, batches) == (before, "signal", ["evaluation.batch"])
    assert steps(recorded.evaluations) == [at for at in (0, 3, 6) if at < before]
    assert recorded.saves == [before]


def test_a_line_is_the_mean_of_the_rows_of_the_steps_it_stands_for(training_world, one_rank):
    # 54 rows: six steps of eight, one of six, and the first of another epoch.
    how = {"limit_train_batches": 0, "max_steps": 9}
    every, _, _ = run(training_world, one_rank, **how)
    few, _, _ = run(training_world, one_rank, log_every=4, **how)
    assert steps(few.steps) == [4, 8, 9]
    (_, first), (_, second), (_, third) = few.steps
    single = dict(every.steps)
    rows = [8, 8, 6, 8]
    for name in ("loss", "rewards/margins", "rewards/accuracies", "logps/chosen"):
        whole = sum(count * single[5 + at][name] for at, count in enumerate(rows)) / 30
        assert second[name] == pytest.approx(whole, rel=1e-12), name
        assert second[name] != single[8][name]
        assert first[name] == pytest.approx(sum(single[at][name] for at in range(1, 5)) / 4)
        assert third[name] == single[9][name]
    for name in ("grad_norm", "tokens"):
        assert second[name] == pytest.approx(sum(single[at][name] for at in range(5, 9)) / 4)
    for name in ("lr", "epoch"):
        assert second[name] == single[8][name]


def test_labels_are_weighed_by_how_many_there_were(training_world, one_rank):
    how = {"max_steps": 3, "batch_size": 3, "lr": 1e-2}
    session, every = learn(job_of(training_world.labels, "kto", **how), one_rank)
    _, once = learn(job_of(training_world.labels, "kto", log_every=3, **how), one_rank)
    ((_, line),) = once.steps
    with session.feed.steps(START.cursor) as batches:
        roles = [np.concatenate([one.roles for one in next(batches).own]) for _ in range(3)]
    counts = [int((found == Role.DESIRABLE).sum()) for found in roles]
    assert len(set(counts)) > 1
    assert 0 < sum(counts) < 9
    good = [
        count * metrics["rewards/chosen"]
        for count, (_, metrics) in zip(counts, every.steps, strict=True)
        if count
    ]
    assert line["rewards/chosen"] == pytest.approx(sum(good) / sum(counts))
    assert line["rewards/margins"] == line["rewards/chosen"] - line["rewards/rejected"]


def test_a_step_says_whether_it_was_applied(training_world, one_rank):
    recorded, _, _ = run(training_world, one_rank, max_steps=2)
    assert [metrics["step_applied"] for _, metrics in recorded.steps] == [1.0, 1.0]


def test_the_time_of_a_save_belongs_to_no_step(training_world, one_rank, monkeypatch):
    ticks = itertools.count()  # a clock that goes on by one whenever it is read
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: next(ticks)))

    class Slow(Recorded):
        def save(self, place):
            for _ in range(1000):
                next(ticks)

    recorded, _, _ = run(training_world, one_rank, recorded=Slow(), save_every=1, max_steps=3)
    seconds = [metrics["speed/step_seconds"] for _, metrics in recorded.steps]
    assert len(seconds) == 3
    assert max(seconds) < 1000


def test_when_the_time_is_over_it_saves_where_it_is(training_world, one_rank):
    over = StopConditions(lambda: False, time.monotonic())
    recorded, place, ending = run(training_world, one_rank, conditions=over)
    assert (recorded.steps, recorded.saves, place, ending) == ([], [0], START, "time")


def test_the_rates_are_those_of_the_schedule(training_world, one_rank):
    schedule = {"lr": 4e-4, "warmup": 2, "schedule": "linear"}
    recorded, _, _ = run(training_world, one_rank, **schedule)
    # Of six steps two rise; the other four fall by a quarter each.
    assert [metrics["lr"] for _, metrics in recorded.steps] == pytest.approx(
        [2e-4, 4e-4, 4e-4, 3e-4, 2e-4, 1e-4]
    )


def test_an_evaluation_leaves_no_trace_in_the_weights(training_world, one_rank):
    """The held-out rows are the same whether they are measured or not."""
    settings = {"max_steps": 3, "limit_train_batches": 3, **HELD_OUT}
    seldom, _ = learn(job_of(training_world.pairs, "kto", **settings), one_rank)
    often, _ = learn(job_of(training_world.pairs, "kto", eval_every=1, **settings), one_rank)
    others = often.engine.weights()
    for name, weights in seldom.engine.weights().items():
        assert weights.equal(others[name])


def test_an_option_of_the_second_part_of_a_mixture_decides_what_a_step_runs(
    training_world, one_rank
):
    options = {"kto_logsigmoid.kl_use": "all", "kto_logsigmoid.kl_per_step": 7}
    job = job_of(training_world.pairs, "dpo+kto_logsigmoid", options=options, max_steps=1)
    session, recorded = learn(job, one_rank)
    assert session.feed.settings.kl_use == "all"
    ((_, metrics),) = recorded.steps
    assert metrics["kl/pairs"] == 7
