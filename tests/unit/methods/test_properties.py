"""What holds for every method; a new line of the table is tested without anyone remembering."""

import itertools
import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from align.schemas.rows import Role
from align.stages.methods.table import objective_of
from support.method_steps import (
    BY_NAME,
    LABELS,
    MISMATCHED,
    OBJECTIVES,
    ROLES,
    completions,
    each,
    moved,
    num_rows,
    random_completions,
    take,
    take_objective,
)

EXTREMES = (0.0, -1e-8, -50.0, -1e4)
SCORES = (2.0, -1.0, 0.5, 0.5, 1e4, 0.5, 0.5)
VALUES = (0.0, 1e4, -1e4, 0.5, -2.0)
# Methods of two sides that compare nothing, and so have no rewards to report.
WITHOUT_REWARDS = {"csft"}
# Methods with a reference that divide each completion by its own length.
PER_TOKEN = {"ipo", "dpo_norm"}
# What more a divergence can be, and modifiers that change the same ratios one after the other.
DIVERGING = [
    {"f_divergence": "forward_kl"},
    {"f_divergence": "alpha", "f_alpha": 0.3},
    {"f_divergence": "alpha", "f_alpha": 3.0},
    {"f_divergence": "alpha", "f_alpha": -2.0, "ld_alpha": 0.2, "humanline": True},
    {"ld_alpha": 0.0},
]
EXTREME = OBJECTIVES | {f"dpo {values}": (objective_of("dpo", values),) for values in DIVERGING}


@cache
def corners(kind):
    """Every pair of extreme completions: certain, hopeless, and 1e4 nats from the reference."""
    size = len(ROLES[kind])
    sides = itertools.product(EXTREMES, EXTREMES)
    sides = [(*side, length) for side, length in zip(sides, itertools.cycle((1, 7)), strict=False)]
    flat = [side for both in itertools.product(sides, sides) for side in both]
    rows = len(flat) // size
    logps, reference, num_tokens = zip(*flat[: rows * size], strict=True)
    whole = completions(
        list(logps),
        list(reference),
        num_tokens=list(num_tokens),
        roles=ROLES[kind] * rows,
        scores=list(itertools.islice(itertools.cycle(SCORES), rows * size)),
        per_row=size,
        columns={"wanted": [1.0] * rows, "weight": [0.5] * rows},
    )
    values = itertools.islice(itertools.cycle(VALUES), len(whole.tokens.values))
    with torch.no_grad():
        whole.tokens.values.copy_(torch.tensor(list(values)))
    return whole


def require_finite(taken):
    assert taken.losses.isfinite().all()
    assert taken.token_gradient.isfinite().all()
    assert taken.value_gradient.isfinite().all()
    assert all(values.isfinite().all() for values in taken.values.values())
    known = [value for state in taken.state.values() for value in state]
    assert torch.tensor([taken.loss, *known, *taken.means.values()]).isfinite().all()


def require_same(some, others):
    # Vectorised and scalar exp() may differ in the last bit, and so may sums in another order.
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
    close(some.losses, others.losses)
    close(some.token_gradient, others.token_gradient)
    close(some.value_gradient, others.value_gradient)
    close(some.loss, others.loss)
    close(some.reported, others.reported)
    close(some.means, others.means)
    close(in_order(some.values), in_order(others.values))
    assert some.state == others.state


def in_order(values):
    return {name: of_each.sort().values for name, of_each in values.items()}


@each(EXTREME)
def test_loss_and_gradient_are_finite_ten_thousand_nats_away(objective):
    for kl in (0.0, 1e4, -1e4) if "mismatched" in objective.needs else (0.0,):
        require_finite(take_objective(objective, corners(objective.rows), mismatched=(kl,)))


@each(OBJECTIVES)
def test_a_step_without_rows_gives_nothing_and_no_nan(objective):
    for mismatched in ((), MISMATCHED):
        taken = take_objective(
            objective, random_completions(objective.rows, 0), mismatched=mismatched
        )
        assert len(taken.losses) == len(taken.token_gradient) == 0
        assert (taken.means, taken.reported) == ({}, None)
        require_finite(taken)


@each(BY_NAME)
def test_what_a_single_row_label_or_candidate_cannot_tell_is_left_out(method):
    alone = {"labelled": [(label,) * 2 for label in LABELS], "grouped": [(Role.CANDIDATE,)]}
    for roles in (None, *alone.get(method.rows, ())):
        taken = take(method, random_completions(method.rows, 1, roles=roles), mismatched=(0.7,))
        require_finite(taken)
        if roles and method.rows == "labelled" and method.name not in WITHOUT_REWARDS:
            for name, label in zip(("chosen", "rejected"), LABELS, strict=True):
                assert (f"rewards/{name}" in taken.means) == (label in roles)


@each(OBJECTIVES)
def test_any_way_to_deal_a_step_to_micro_batches_and_ranks_gives_the_same(objective):
    state = take_objective(objective, random_completions(objective.rows, 5, seed=9)).state
    # Rows of one completion make micro-batches of one label, or of a candidate without another.
    sizes = (None, 1, 4) if objective.rows in {"labelled", "grouped"} else (None,)
    for seed, per_row in enumerate(sizes):
        draw, hands = random.Random(seed), [[], [], [], []]  # the last of them gets nothing
        whole = random_completions(objective.rows, 5, seed=seed, per_row=per_row)
        for row in range(num_rows(whole)):
            draw.choice(hands[:3]).append(row)
        how = {"mismatched": MISMATCHED, "state": state}
        once = take_objective(objective, whole, **how)
        require_same(once, take_objective(objective, whole, **how, assignment=hands))
        assert once.reported == pytest.approx(once.loss, rel=1e-12)


@each(BY_NAME)
def test_a_method_reads_what_it_says_that_it_needs_or_remembers_and_nothing_else(method):
    whole, earlier = (random_completions(method.rows, 3, seed=seed) for seed in (0, 1))
    elsewhere = moved(whole, reference=whole.reference - 1.5 * whole.reference.cos())
    rated = replace(whole, scores=whole.scores.exp())
    state = take(method, earlier, mismatched=MISMATCHED).state
    assert state.keys() == ({method.name} if method.keeps_mean else set())
    here = take(method, whole, mismatched=(0.5,))
    others = {
        "reference": take(method, elsewhere, mismatched=(0.5,)),
        "mismatched": take(method, whole, mismatched=(2.0,)),
        "scores": take(method, rated, mismatched=(0.5,)),
        "state": take(method, whole, mismatched=(0.5,), state=state),
    }
    wanted = method.needs | ({"state"} if method.keeps_mean else set())
    for need, other in others.items():
        assert torch.equal(here.losses, other.losses) != (need in wanted), need
    assert (here.means == others["reference"].means) != ("reference" in method.needs)
    assert ("kl/raw" in here.means) == ("mismatched" in method.needs)


@each(BY_NAME)
def test_methods_of_two_sides_report_rewards_and_log_probs_under_the_same_names(method):
    if method.rows not in {"paired", "labelled"} or method.name in WITHOUT_REWARDS:
        return
    whole = random_completions(method.rows, 3)
    taken = take(method, whole, mismatched=MISMATCHED)
    logps, told = whole.logps.detach(), taken.means
    expected = {"rewards" if method.head == "score" else "logps": logps}
    if "reference" in method.needs:
        by = whole.num_tokens if method.name in PER_TOKEN else 1
        expected["rewards"] = method.options().beta * (logps - whole.reference) / by
    for name, values in expected.items():
        for side, of_side in ((f"{name}/chosen", values[0::2]), (f"{name}/rejected", values[1::2])):
            assert told[side] == pytest.approx(of_side.mean().item())
            if method.rows == "paired":
                torch.testing.assert_close(taken.values[side], of_side)
    if method.rows == "paired":
        margin = told["rewards/chosen"] - told["rewards/rejected"]
        assert told["rewards/margins"] == pytest.approx(margin)
