"""What holds for every method; a new line of the table is tested without anyone remembering."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.rows import Role
from align.stages.methods.recipe import is_good
from align.stages.methods.table import METHODS
from support.method_steps import (
    IN_USE,
    MISMATCHED,
    ROLES,
    branches,
    moved,
    num_rows,
    part,
    random_branches,
    reordered,
    take,
    unmoved,
)

EXTREMES = (0.0, -1e-8, -1e-3, -50.0, -1e4)
SCORES = (2.0, -1.0, 0.5, 0.5, 30.0, 0.5, 0.5)
# Why the gradient of a method may turn round once a branch is far from the reference.
AIMED = {
    "cdpo": "a label may be wrong: it wants a margin of finite size",
    "exo": "as cdpo",
    "ipo": "it aims at a margin",
    "nca": "it aims at a log-ratio of either side",
    "sppo": "as nca",
    "apo_down": "it lowers both sides",
    "discopop": "between -tau and tau its loss rises with the margin",
    "rpo_sq": "it aims at the margin that the scores tell",
    "rpo_bwd_kl": "as rpo_sq",
    "rpo_fwd_kl": "as rpo_sq",
    "grpo": "its distance from the reference pulls back",
    "ppo": "as grpo, and values decide what each token is worth",
    "csft": "it imitates both labels, each behind a token of its own",
}
# Why that of a policy at the reference may point elsewhere than up for good and down for bad.
NOT_EVEN_AT_FIRST = {name: AIMED[name] for name in ("apo_down", "discopop", "ppo", "csft")}
# Methods of two sides that compare nothing, and so have no rewards to report.
WITHOUT_REWARDS = {"csft"}
# Methods with a reference that divide each branch by its own length.
PER_TOKEN = {"ipo", "dpo_norm"}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
every_modifier = pytest.mark.parametrize(
    ("method", "modifiers"),
    [
        pytest.param(method, IN_USE[name], id=f"{method.name} {name}")
        for method in METHODS.values()
        for name in sorted(method.modifiers)
    ],
)


def corners(method):
    """Every pair of extreme branches: certain, hopeless, and 1e4 nats from the reference."""
    size = len(ROLES[method.rows])
    sides = list(itertools.product(EXTREMES, EXTREMES, (1, 50)))
    flat = [side for both in itertools.product(sides, sides) for side in both]
    rows = len(flat) // size
    logps, reference, num_tokens = zip(*flat[: rows * size], strict=True)
    return branches(
        list(logps),
        list(reference),
        num_tokens=list(num_tokens),
        roles=ROLES[method.rows] * rows,
        scores=list(itertools.islice(itertools.cycle(SCORES), rows * size)),
        per_row=size,
        columns={"wanted": [1.0] * rows, "weight": [0.5] * rows},
    )


def directions(whole):
    """+1 for tokens that should grow likelier, -1 for those that should not, 0 for neither."""
    if (whole.roles == Role.CANDIDATE).all():
        scores = whole.scores.view(-1, 3)
        signs = (scores - scores.mean(dim=1, keepdim=True)).sign().view(-1)
    else:
        signs = torch.where(is_good(whole), 1, -1)
    return signs.repeat_interleave(whole.tokens.counts)


def require_finite(taken):
    assert taken.losses.isfinite().all()
    assert taken.token_gradient.isfinite().all()
    assert taken.value_gradient.isfinite().all()
    assert all(values.isfinite().all() for values in taken.metrics.values())
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
    close(sorted_values(some.metrics), sorted_values(others.metrics))
    assert some.state == others.state


def sorted_values(metrics):
    return {name: values.sort().values for name, values in metrics.items()}


def draw_assignment(data, rows):
    """Deals rows to micro-batches of ranks: some get none, and they come in any order."""
    hands = data.draw(st.integers(1, 4))
    owners = data.draw(st.lists(st.integers(0, hands - 1), min_size=rows, max_size=rows))
    return [[row for row in range(rows) if owners[row] == hand] for hand in range(hands)]


@every_method
@pytest.mark.parametrize("kl", [0.0, 1e4, -1e4])
def test_loss_and_gradient_are_finite_ten_thousand_nats_away(method, kl):
    require_finite(take(method, corners(method), mismatched=(kl,)))


@every_modifier
def test_no_modifier_makes_an_extreme_branch_infinite(method, modifiers):
    require_finite(take(method, corners(method), mismatched=(1.0,), modifiers=modifiers))


@every_method
@pytest.mark.parametrize("mismatched", [(), MISMATCHED])
def test_a_step_without_rows_gives_nothing_and_no_nan(method, mismatched):
    taken = take(method, random_branches(method.rows, 0), mismatched=mismatched)
    assert taken.losses.shape == (0,)
    assert taken.token_gradient.shape == (0,)
    assert taken.means == {}
    assert taken.reported is None
    require_finite(taken)


@every_method
def test_a_micro_batch_without_rows_changes_nothing(method):
    whole = random_branches(method.rows, 3)
    once = take(method, whole, mismatched=MISMATCHED)
    for assignment in ([[], [0, 1, 2]], [[0, 1, 2], []], [[], [0], [], [1, 2]]):
        require_same(once, take(method, whole, mismatched=MISMATCHED, assignment=assignment))


@every_method
@pytest.mark.parametrize("label", [0, 1])
def test_a_single_row_and_a_single_label_leave_out_what_they_cannot_tell(method, label):
    only = (ROLES["labelled"][label],) * 2 if method.rows == "labelled" else None
    taken = take(method, random_branches(method.rows, 1, roles=only), mismatched=MISMATCHED[:1])
    require_finite(taken)
    if only and method.name not in WITHOUT_REWARDS:
        assert f"rewards/{('chosen', 'rejected')[label]}" in taken.means
        assert f"rewards/{('rejected', 'chosen')[label]}" not in taken.means


@every_method
def test_a_single_candidate_can_be_compared_to_nothing_and_is_finite(method):
    if method.rows == "grouped":
        require_finite(take(method, random_branches("grouped", 3, roles=(Role.CANDIDATE,))))


@every_method
@settings(max_examples=25)
@given(data=st.data())
def test_any_way_to_deal_a_step_to_micro_batches_and_ranks_gives_the_same(method, data):
    # Rows of one branch make micro-batches of one label.
    sizes = st.integers(1, 3) if method.rows == "labelled" else st.none()
    whole, before = (
        random_branches(
            method.rows, data.draw(st.integers(1, 6)), seed=seed, per_row=data.draw(sizes)
        )
        for seed in (data.draw(st.integers(0, 99)), 100)
    )
    state = take(method, before, mismatched=MISMATCHED).state
    how = {"mismatched": MISMATCHED, "state": state}
    once = take(method, whole, **how)
    require_same(
        once, take(method, whole, **how, assignment=draw_assignment(data, num_rows(whole)))
    )


@every_modifier
@settings(max_examples=5)
@given(data=st.data())
def test_modified_methods_do_not_depend_on_the_deal_either(method, modifiers, data):
    whole = random_branches(method.rows, 5, seed=data.draw(st.integers(0, 99)))
    how = {"mismatched": MISMATCHED, "modifiers": modifiers}
    once = take(method, whole, **how)
    require_same(once, take(method, whole, **how, assignment=draw_assignment(data, 5)))
    assert once.loss != take(method, whole, mismatched=MISMATCHED).loss


@every_method
def test_the_loss_that_is_reported_is_the_one_that_is_learned_from(method):
    taken = take(method, random_branches(method.rows, 7), mismatched=MISMATCHED, cuts=(2, 3))
    assert taken.reported == pytest.approx(taken.loss, rel=1e-12)


@every_method
def test_the_order_of_rows_changes_nothing(method):
    whole, order = random_branches(method.rows, 4), [3, 2, 0, 1]
    turned = reordered(whole, order)
    one, other = (take(method, some, mismatched=MISMATCHED) for some in (whole, turned))
    told = replace(whole, tokens=replace(whole.tokens, logps=one.token_gradient))
    torch.testing.assert_close(part(told, order).tokens.logps, other.token_gradient)
    assert one.means == pytest.approx(other.means)


@every_method
def test_an_unmoved_policy_is_pushed_towards_good_branches_and_away_from_bad_ones(method):
    whole = unmoved(random_branches(method.rows, 20))
    gradient, towards = take(method, whole, mismatched=(0.0,)).token_gradient, directions(whole)
    is_so = (gradient[towards > 0] < 0).all() and (gradient[towards < 0] >= 0).all()
    assert bool(is_so) == (method.name not in NOT_EVEN_AT_FIRST)


@every_method
def test_only_methods_with_an_aim_ever_turn_round(method):
    whole = random_branches(method.rows, 200)
    far = moved(whole, reference=whole.logps.detach() - 60 * whole.logps.detach().sin())
    pushes = -take(method, far, mismatched=MISMATCHED).token_gradient * directions(far)
    assert bool((pushes >= 0).all()) == (method.name not in AIMED)


def test_no_exception_outlives_its_method():
    assert AIMED.keys() <= METHODS.keys()
    assert METHODS.keys() >= WITHOUT_REWARDS | PER_TOKEN


def test_apo_down_only_lowers_the_rejected_branch_at_first():
    gradient = take(METHODS["apo_down"], unmoved(random_branches("paired", 20))).gradient
    assert (gradient[0::2] == 0).all()  # b S'(0) of the first term, less the same of the second
    assert (gradient[1::2] > 0).all()


@every_method
def test_a_method_reads_the_reference_exactly_when_it_says_so(method):
    whole = random_branches(method.rows, 3)
    elsewhere = moved(whole, reference=whole.reference - 1.5 * whole.reference.cos())
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
def test_a_method_reads_scores_exactly_when_it_says_so(method):
    whole = random_branches(method.rows, 3)
    others = replace(whole, scores=whole.scores.exp())
    one, other = (take(method, some, mismatched=MISMATCHED) for some in (whole, others))
    assert torch.equal(one.losses, other.losses) != ("scores" in method.needs)


@every_method
def test_a_method_that_remembers_is_told_what_it_remembered(method):
    whole, earlier = (random_branches(method.rows, 3, seed=seed) for seed in (0, 1))
    state = take(method, earlier, mismatched=MISMATCHED).state
    fresh = take(method, whole, mismatched=MISMATCHED)
    later = take(method, whole, mismatched=MISMATCHED, state=state)
    assert state.keys() == ({method.name} if method.update_state else set())
    assert torch.equal(fresh.losses, later.losses) != bool(method.update_state)


@every_method
def test_a_survey_tells_one_finite_number_of_each_branch_and_no_gradient(method):
    if method.survey:
        whole = random_branches(method.rows, 3)
        for name, values in method.survey(whole, method.options()).items():
            assert values.shape == whole.logps.shape, name
            assert values.dtype == torch.float64, name
            assert values.isfinite().all(), name
            assert not values.requires_grad, name


@every_method
def test_methods_of_two_sides_report_rewards_and_log_probs_under_the_same_names(method):
    if method.rows not in {"paired", "labelled"} or method.name in WITHOUT_REWARDS:
        return
    whole = random_branches(method.rows, 3)
    taken = take(method, whole, mismatched=MISMATCHED)
    logps = whole.logps.detach()
    chosen, rejected = taken.metrics["rewards/chosen"], taken.metrics["rewards/rejected"]
    if method.head == "score":
        assert torch.equal(chosen, logps[0::2])
        assert torch.equal(rejected, logps[1::2])
    else:
        assert torch.equal(taken.metrics["logps/chosen"], logps[0::2])
        assert torch.equal(taken.metrics["logps/rejected"], logps[1::2])
    if "reference" in method.needs:
        beta = method.options().beta
        by = whole.num_tokens if method.name in PER_TOKEN else 1
        torch.testing.assert_close(chosen, (beta * (logps - whole.reference) / by)[0::2])
        torch.testing.assert_close(rejected, (beta * (logps - whole.reference) / by)[1::2])
    if method.rows == "paired":
        margins = taken.metrics["rewards/margins"]
        assert margins.mean() == pytest.approx((chosen - rejected).mean().item())


@every_method
def test_losses_and_metrics_keep_double_precision(method):
    whole = random_branches(method.rows, 3)
    taken = take(method, whole, mismatched=MISMATCHED)
    assert taken.losses.dtype == torch.float64
    assert all(values.dtype == torch.float64 for values in taken.metrics.values())
    assert len(taken.losses) == (3 if method.items == "rows" else len(whole.roles))
