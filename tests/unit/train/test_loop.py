"""When the loop tells, measures, saves and ends."""

import math

import pytest

from align.schemas.batches import Update
from align.schemas.checkpoint import State
from align.stages.train import evaluation
from align.stages.train.together import StopConditions
from support.training_world import START, Recorded, job_of, learn, session_of, through

HELD_OUT = {"eval_fraction": 0.3}


@pytest.fixture
def run(training_world, one_rank):
    """Three steps an epoch, two epochs unless set otherwise."""

    def trained(recorded=None, *, start=START, stop=None, **settings):
        settings = {"batch_size": 18, **settings}
        session = session_of(job_of(training_world.pairs, "dpo", **settings), one_rank)
        return through(session, start, recorded=recorded, stop=stop)

    return trained


def steps(recorded):
    return [step for step, _ in recorded]


def at(step, *, evaluated=False):
    return State(step=step, evaluated=evaluated)


@pytest.mark.parametrize(
    ("settings", "told", "measured", "saved"),
    [
        # Everything has its own rhythm, and is done at the end, once.
        (
            {"log_every": 2, "eval_every": 3, "save_every": 4, "max_steps": 5},
            [2, 4, 5],
            [0, 3, 5],
            [4, 5],
        ),
        # It ends with the epochs; nothing is held out.
        ({"max_steps": 100, "eval_fraction": 0.0}, [1, 2, 3, 4, 5, 6], [], [6]),
        # So it does where the last one is not whole: half of three steps are two.
        ({"epochs": 1.5, "eval_fraction": 0.0}, [1, 2, 3, 4, 5], [], [5]),
        ({"epochs": 0.1, "eval_fraction": 0.0}, [1], [], [1]),
        # A run that goes on measures no beginning, and one that was over is only saved.
        ({"start": at(4)}, [5, 6], [6], [6]),
        ({"start": at(6, evaluated=True)}, [], [], [6]),
        # An evaluation that was due and never ended is made first.
        ({"start": at(3), "eval_every": 3}, [4, 5, 6], [3, 6], [6]),
        ({"start": at(6)}, [], [6], [6]),
    ],
)
def test_what_is_due_is_done_once(run, settings, told, measured, saved):
    rising = {"lr": 6e-4, "warmup": 6, "schedule": "constant"}
    recorded, place, ending = run(**HELD_OUT | rising | settings)
    assert [line["lr"] for _, line in recorded.steps] == pytest.approx([at * 1e-4 for at in told])
    assert steps(recorded.steps) == told
    assert steps(recorded.evaluations) == measured
    assert recorded.saves == saved
    is_measured = saved[-1] in measured or not told
    assert (place.step, place.evaluated, ending) == (saved[-1], is_measured, "finished")
    epochs = [metrics["epoch"] for _, metrics in recorded.steps]
    assert epochs == pytest.approx([step / 3 for step in told])
    assert all(metrics["step_applied"] == 1 for _, metrics in recorded.steps)


def test_a_step_that_is_not_applied_enters_no_mean(training_world, one_rank, monkeypatch):
    """The mean of bco is over all rewards so far."""
    session = session_of(job_of(training_world.labels, "bco", max_steps=1), one_rank)
    refused = Update(applied=False, grad_norm=math.inf)
    monkeypatch.setattr(session.engine, "step", lambda: refused)
    recorded, place, _ = through(session)
    assert [step for step, _ in recorded.refused] == [1]
    assert place.methods == {}


def test_a_run_of_which_nothing_is_learned_ends_when_its_patience_does(run):
    """Without a learning rate every evaluation is the first one again."""
    still = {"lr": 0.0, "eval_fraction": 0.3, "eval_every": 2, "best": "eval/loss", "patience": 2}
    recorded, place, ending = run(**still)
    assert steps(recorded.evaluations) == [0, 2, 4]
    assert (place.step, ending, recorded.saves) == (4, "finished", [4])
    assert (place.best.step, place.best.since) == (0, 2)
    recorded, place, _ = run(start=place, **still)
    assert (recorded.steps, place.step) == ([], 4)
    recorded, place, _ = run(start=place, **still | {"patience": 3})
    assert (place.step, place.best.since) == (6, 3)
    _, place, _ = run(start=START, **still | {"patience": 0})
    assert (place.step, place.best.since) == (6, 3)


def test_a_run_that_ends_by_its_patience_tells_of_its_last_steps(run):
    still = {"lr": 0.0, "eval_fraction": 0.3, "eval_every": 2, "best": "eval/loss", "patience": 2}
    every, few = (run(log_every=lines, **still)[0] for lines in (1, 3))
    assert (steps(every.steps), steps(few.steps)) == ([1, 2, 3, 4], [3, 4])
    assert few.steps[-1][1]["loss"] == every.steps[-1][1]["loss"]
    assert few.saves == [4]


def test_a_step_is_measured_before_it_is_saved_and_saved_without_it_where_that_fails(run):
    order = []

    class InOrder(Recorded):
        def evaluated(self, place, metrics, samples):
            if place.step == 6:
                raise ZeroDivisionError
            order.append(("evaluated", place.step))

        def save(self, place):
            order.append(("saved", place.step, place.evaluated))

    with pytest.raises(ZeroDivisionError):
        run(InOrder(), save_every=3, eval_every=3, **HELD_OUT)
    assert order == [("evaluated", 0), ("evaluated", 3), ("saved", 3, True), ("saved", 6, False)]


@pytest.mark.parametrize("before", [0, 3])
def test_an_evaluation_is_stopped_between_two_batches(run, monkeypatch, before):
    """Somebody asks in the first batch of the evaluation after that many steps."""
    recorded, batches, completions_of = Recorded(), [], evaluation.completions_of

    def noted(*given):
        if len(recorded.steps) == before:
            batches.append(given)
        return completions_of(*given)

    monkeypatch.setattr(evaluation, "completions_of", noted)
    stop = StopConditions(lambda: bool(batches))
    _, place, ending = run(recorded, stop=stop, eval_every=3, batch_size=2, **HELD_OUT)
    assert (place.step, ending, len(batches)) == (before, "signal", 1)
    assert not place.evaluated
    assert steps(recorded.evaluations) == [step for step in (0, 3, 6) if step < before]
    assert recorded.saves == [before]


def test_a_line_is_the_mean_of_the_rows_of_the_steps_it_stands_for(run):
    # 54 rows: six steps of eight, one of six, and the first of another epoch.
    how = {"batch_size": 8, "max_steps": 9}
    every, few = (run(log_every=steps, **how)[0] for steps in (1, 4))
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


def test_an_evaluation_leaves_no_trace_in_the_weights(training_world, one_rank):
    """The held-out rows are the same whether they are measured or not."""
    settings = {"max_steps": 3, **HELD_OUT}
    seldom, often = (
        learn(job_of(training_world.pairs, "kto", eval_every=steps, **settings), one_rank)[0]
        for steps in (0, 1)
    )
    others = often.engine.weights()
    for name, weights in seldom.engine.weights().items():
        assert weights.equal(others[name])


def test_dropout_is_drawn_anew_in_each_micro_batch_of_each_step_and_not_to_measure(
    training_world, one_rank, monkeypatch
):
    settings = {"max_steps": 3, "tokens_per_batch": 350, **HELD_OUT}
    session = session_of(job_of(training_world.pairs, "dpo", **settings), one_rank)
    seeds, learn_mode = [], session.engine.learn_mode

    def noted(*, dropout_seed):
        seeds.append(dropout_seed)
        learn_mode(dropout_seed=dropout_seed)

    monkeypatch.setattr(session.engine, "learn_mode", noted)
    through(session)
    drawn = [seed for seed in seeds if seed is not None]
    assert len(set(drawn)) == len(drawn) >= 6
    assert seeds[0] is None  # of the evaluations, at the beginning and the end
    assert seeds[-1] is None
