"""After how many evaluations a training is over."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.checkpoint import Best
from align.schemas.train_options import TrainOptions
from align.stages.train.patience import best_of_sets, why_over, with_evaluation

LOSS = {"best": "eval/loss", "patience": 2}


def ends_at(values, **settings):
    """The index of the evaluation that ends a run, and the best one so far; None: none does."""
    options, so_far = TrainOptions(**LOSS | settings), None
    name = options.best.lstrip("+-")
    for step, value in enumerate(values):
        so_far = with_evaluation(so_far, {name: value}, step=step, options=options)
        if why_over(so_far, options):
            return step, so_far.step
    return None


@pytest.mark.parametrize(
    ("settings", "values", "end"),
    [
        # 3 is the best until 2, of which 2.5 and 2 are no better.
        ({}, [3, 3.5, 2, 2.5, 2, 1], (4, 2)),
        ({"patience": 3}, [3, 3.5, 2, 2.5, 2, 1], None),
        ({"patience": 1}, [3, 3.5, 2], (1, 0)),
        ({"patience": 0}, [3, 4, 5, 6], None),
        ({"best": "eval/rewards/accuracies"}, [0.5, 0.6, 0.55, 0.6], (3, 1)),
        ({"best": "-eval/rewards/accuracies"}, [0.5, 0.6, 0.55, 0.6], (2, 0)),
        # What is not a number is no better than anything, and anything is better than that.
        ({}, [3, math.nan, 2, math.inf, math.nan], (4, 2)),
        ({}, [math.nan, 5, 6, 7], (3, 1)),
        ({}, [math.nan, math.nan], (1, 0)),
    ],
)
def test_so_many_evaluations_in_a_row_that_are_no_better_end_it(settings, values, end):
    assert ends_at(values, **settings) == end


@pytest.mark.parametrize(
    ("best", "names", "expected"),
    [
        ("eval/loss", [""], "eval/loss"),
        ("eval/loss", [], "eval/loss"),
        ("", ["a", "b"], ""),
        ("loss", ["a", "b"], "loss"),
        ("eval/loss", ["a", "b"], "-eval/a/loss"),
        ("eval/b/loss", ["a", "b"], "-eval/b/loss"),
        ("+eval/b/loss", ["a", "b"], "+eval/b/loss"),
        ("-eval/b/loss", ["a", "b"], "-eval/b/loss"),
        ("eval/rewards/accuracies", ["a", "b"], "+eval/a/rewards/accuracies"),
        # Of metrics with these names the lowest value is the best; of sets it is not.
        ("eval/errors/rewards/accuracies", ["a", "errors"], "+eval/errors/rewards/accuracies"),
        ("eval/loss", ["loss", "b"], "-eval/loss/loss"),
    ],
)
def test_the_best_of_several_sets_is_of_the_first_unless_it_names_one(best, names, expected):
    assert best_of_sets(best, names) == expected


def first_end(values, patience):
    """Looks back from each evaluation at all of those before it."""
    for now in range(len(values)):
        best = 0
        for at in range(1, now + 1):
            best = at if values[at] < values[best] else best
        if now - best >= patience:
            return now, best
    return None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_looking_back_each_time_ends_it_at_the_same_evaluation(values, patience):
    assert ends_at(values, patience=patience) == first_end(values, patience)


def test_another_metric_begins_anew():
    options = TrainOptions(**LOSS)
    so_far = Best("eval/loss", value=1.0, step=4, since=1)
    other = replace(options, best="eval/nll")
    assert why_over(replace(so_far, since=2), options)
    assert not why_over(replace(so_far, since=2), other)
    anew = with_evaluation(so_far, {"eval/nll": 7.0}, step=8, options=other)
    assert anew == Best("eval/nll", value=7.0, step=8, since=0)
