"""What holds for every method; a new line of the table is tested without anyone remembering."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_steps import ROLES, branches, random_branches, take

from align.stages.methods.table import METHODS

MISMATCHED = (0.7, -0.2, 1.1)
EXTREMES = (0.0, -1e-8, -1e-3, -50.0, -1e4)
# These aim at a margin, or at the reference, and pull back beyond it.
AIMED = {"cdpo", "exo", "ipo", "nca", "sppo", "apo_down", "discopop"}
# apo_down lowers chosen too; discopop's bump between -tau and tau turns the gradient round.
NOT_EVEN_AT_FIRST = {"apo_down", "discopop"}

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def corners(method):
    """Every pair of extreme branches: certain, hopeless, and 1e4 nats from the reference."""
    sides = list(itertools.product(EXTREMES, EXTREMES, (1.0, 200.0)))
    rows = list(itertools.product(sides, sides))
    logps, reference, num_tokens = zip(*(side for row in rows for side in row), strict=True)
    return branches(
        list(logps),
        list(reference),
        num_tokens=list(num_tokens),
        roles=ROLES[method.rows] * len(rows),
    )


@every_method
@pytest.mark.parametrize("kl", [0.0, 1e4, -1e4])
def test_loss_and_gradient_are_finite_ten_thousand_nats_away(method, kl):
    taken = take(method, corners(method), mismatched=(kl,))
    assert taken.losses.isfinite().all()
    assert taken.gradient.isfinite().all()
    assert all(values.isfinite().all() for values in taken.metrics.values())


@every_method
@pytest.mark.parametrize("mismatched", [(), MISMATCHED])
def test_a_micro_batch_without_rows_gives_nothing_and_no_nan(method, mismatched):
    taken = take(method, random_branches(method.rows, 0), mismatched=mismatched)
    assert taken.losses.shape == (0,)
    assert taken.gradient.shape == (0,)
    assert taken.means == {}


@every_method
@pytest.mark.parametrize("label", [0, 1])
def test_a_single_row_and_a_single_label_leave_out_what_they_cannot_tell(method, label):
    only = (ROLES["labelled"][label],) * 2 if method.rows == "labelled" else None
    taken = take(method, random_branches(method.rows, 1, roles=only), mismatched=MISMATCHED[:1])
    assert torch.isfinite(torch.tensor([taken.loss, *taken.means.values()])).all()
    assert taken.gradient.isfinite().all()
    if only:
        assert f"rewards/{('chosen', 'rejected')[label]}" in taken.means
        assert f"rewards/{('rejected', 'chosen')[label]}" not in taken.means


@every_method
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_way_to_cut_a_step_into_micro_batches_gives_the_same(method, data):
    rows = data.draw(st.integers(1, 9))
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=5)))
    whole = random_branches(method.rows, rows, seed=data.draw(st.integers(0, 99)))
    once = take(method, whole, mismatched=MISMATCHED)
    cut = take(method, whole, mismatched=MISMATCHED, cuts=cuts)
    # Vectorised and scalar exp() may differ in the last bit.
    close = partial(torch.testing.assert_close, rtol=1e-14, atol=1e-14)
    close(once.losses, cut.losses)
    close(once.gradient, cut.gradient)
    close(once.loss, cut.loss)
    close(once.metrics, cut.metrics)


@every_method
def test_the_order_of_rows_changes_nothing(method):
    whole = random_branches(method.rows, 4)
    flipped = torch.tensor([6, 7, 4, 5, 2, 3, 0, 1])
    turned = replace(
        whole,
        logps=whole.logps.detach()[flipped].requires_grad_(),
        reference=whole.reference[flipped],
        num_tokens=whole.num_tokens[flipped],
    )
    one, other = (take(method, some, mismatched=MISMATCHED) for some in (whole, turned))
    torch.testing.assert_close(one.gradient[flipped], other.gradient)
    assert one.means == pytest.approx(other.means)


@every_method
def test_an_unmoved_policy_is_pushed_towards_chosen_and_away_from_rejected(method):
    if method.name in NOT_EVEN_AT_FIRST:
        return
    whole = random_branches(method.rows, 20)
    still = replace(whole, reference=whole.logps.detach())
    gradient = take(method, still, mismatched=(0.0,)).gradient
    assert (gradient[0::2] < 0).all()
    assert (gradient[1::2] <= 0 if method.name == "apo_down" else gradient[1::2] >= 0).all()


@every_method
def test_only_methods_with_an_aim_ever_turn_round(method):
    whole = random_branches(method.rows, 200)
    far = replace(whole, reference=whole.logps.detach() - 60 * whole.logps.detach().sin())
    gradient = take(method, far, mismatched=MISMATCHED).gradient
    never_turns = bool((gradient[0::2] <= 0).all() and (gradient[1::2] >= 0).all())
    assert never_turns == (method.name not in AIMED)


@every_method
def test_a_method_reads_the_reference_exactly_when_it_says_so(method):
    whole = random_branches(method.rows, 3)
    elsewhere = replace(whole, reference=whole.reference - 1.5 * whole.reference.cos())
    one, other = (take(method, some, mismatched=MISMATCHED) for some in (whole, elsewhere))
    assert torch.equal(one.losses, other.losses) != ("reference" in method.needs)
    assert (one.means == other.means) != ("reference" in method.needs)


@every_method
def test_a_method_reads_mismatched_branches_exactly_when_it_says_so(method):
    whole = random_branches(method.rows, 3)
    one, other = (take(method, whole, mismatched=(kl,)) for kl in (0.5, 2.0))
    assert torch.equal(one.losses, other.losses) != ("mismatched" in method.needs)
    assert ("kl/raw" in one.means) == ("mismatched" in method.needs)


@every_method
def test_every_method_reports_rewards_and_log_probs_under_the_same_names(method):
    whole = random_branches(method.rows, 3)
    taken = take(method, whole, mismatched=MISMATCHED)
    logps = whole.logps.detach()
    assert torch.equal(taken.metrics["logps/chosen"], logps[0::2])
    assert torch.equal(taken.metrics["logps/rejected"], logps[1::2])
    chosen, rejected = taken.metrics["rewards/chosen"], taken.metrics["rewards/rejected"]
    if "reference" in method.needs:
        beta = method.options().beta
        torch.testing.assert_close(chosen, beta * (logps - whole.reference)[0::2])
        torch.testing.assert_close(rejected, beta * (logps - whole.reference)[1::2])
    if method.rows == "paired":
        torch.testing.assert_close(taken.metrics["rewards/margins"], chosen - rejected)
        assert torch.equal(taken.metrics["rewards/accuracies"], (chosen > rejected).double())


@every_method
def test_losses_and_metrics_keep_double_precision(method):
    taken = take(method, random_branches(method.rows, 3), mismatched=MISMATCHED)
    assert taken.losses.dtype == torch.float64
    assert all(values.dtype == torch.float64 for values in taken.metrics.values())
    assert len(taken.losses) == (3 if method.items == "rows" else 6)
