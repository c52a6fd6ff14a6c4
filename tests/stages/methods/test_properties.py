"""What holds for every method; a new line of the table is tested without anyone remembering."""

import itertools
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.rows import Role
from align.stages.methods.recipe import is_good
from align.stages.methods.table import METHODS, recipe_of
from support.method_steps import (
    BY_NAME,
    LABELS,
    MISMATCHED,
    RECIPES,
    ROLES,
    branches,
    each,
    moved,
    num_rows,
    part,
    random_branches,
    reordered,
    take,
    take_recipe,
    unmoved,
)

EXTREMES = (0.0, -1e-8, -1e-3, -50.0, -1e4)
SCORES = (2.0, -1.0, 0.5, 0.5, 1e4, 0.5, 0.5)
VALUES = (0.0, 1e4, -1e4, 0.5, -2.0)
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
# What more a divergence can be, and modifiers that change the same ratios one after the other.
DIVERGING = [
    {"f_divergence": "forward_kl"},
    {"f_divergence": "alpha", "f_alpha": 0.3},
    {"f_divergence": "alpha", "f_alpha": 3.0},
    {"f_divergence": "alpha", "f_alpha": -2.0, "ld_alpha": 0.2, "humanline": True},
    {"ld_alpha": 0.0},
]
EXTREME = RECIPES | {f"dpo {values}": (recipe_of("dpo", values),) for values in DIVERGING}


@cache
def corners(kind):
    """Every pair of extreme branches: certain, hopeless, and 1e4 nats from the reference."""
    size = len(ROLES[kind])
    lengths = (7,) if kind == "grouped" else (1, 7)  # each candidate is compared with each
    sides = list(itertools.product(EXTREMES, EXTREMES, lengths))
    flat = [side for both in itertools.product(sides, sides) for side in both]
    rows = len(flat) // size
    logps, reference, num_tokens = zip(*flat[: rows * size], strict=True)
    whole = branches(
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


@each(EXTREME)
def test_loss_and_gradient_are_finite_ten_thousand_nats_away(recipe):
    for kl in (0.0, 1e4, -1e4) if "mismatched" in recipe.needs else (0.0,):
        require_finite(take_recipe(recipe, corners(recipe.rows), mismatched=(kl,)))


@each(RECIPES)
def test_a_step_without_rows_gives_nothing_and_no_nan(recipe):
    for mismatched in ((), MISMATCHED):
        taken = take_recipe(recipe, random_branches(recipe.rows, 0), mismatched=mismatched)
        assert taken.losses.shape == (0,)
        assert taken.token_gradient.shape == (0,)
        assert taken.means == {}
        assert taken.reported is None
        require_finite(taken)


@each(BY_NAME)
def test_what_a_single_row_label_or_candidate_cannot_tell_is_left_out(method):
    alone = {"labelled": [(label,) * 2 for label in LABELS], "grouped": [(Role.CANDIDATE,)]}
    for roles in (None, *alone.get(method.rows, ())):
        taken = take(method, random_branches(method.rows, 1, roles=roles), mismatched=(0.7,))
        require_finite(taken)
        if roles and method.rows == "labelled" and method.name not in WITHOUT_REWARDS:
            for name, label in zip(("chosen", "rejected"), LABELS, strict=True):
                assert (f"rewards/{name}" in taken.means) == (label in roles)


@each(RECIPES)
@settings(max_examples=10)
@given(data=st.data())
def test_any_way_to_deal_a_step_to_micro_batches_and_ranks_gives_the_same(recipe, data):
    # Rows of one branch make micro-batches of one label, or of a candidate without another.
    has_sizes = recipe.rows in {"labelled", "grouped"}
    sizes = st.integers(1, 4) if has_sizes else st.none()
    whole, before = (
        random_branches(
            recipe.rows, data.draw(st.integers(1, 6)), seed=seed, per_row=data.draw(sizes)
        )
        for seed in (data.draw(st.integers(0, 99)), 100)
    )
    state = take_recipe(recipe, before, mismatched=MISMATCHED).state
    how = {"mismatched": MISMATCHED, "state": state}
    once = take_recipe(recipe, whole, **how)
    assignment = draw_assignment(data, num_rows(whole))
    require_same(once, take_recipe(recipe, whole, **how, assignment=assignment))
    assert once.reported == pytest.approx(once.loss, rel=1e-12)


@each(BY_NAME)
def test_the_order_of_rows_changes_nothing(method):
    whole, order = random_branches(method.rows, 4), [3, 2, 0, 1]
    turned = reordered(whole, order)
    one, other = (take(method, some, mismatched=MISMATCHED) for some in (whole, turned))
    told = replace(whole, tokens=replace(whole.tokens, logps=one.token_gradient))
    torch.testing.assert_close(part(told, order).tokens.logps, other.token_gradient)
    assert one.means == pytest.approx(other.means)


@each(BY_NAME)
def test_an_unmoved_policy_is_pushed_towards_good_branches_and_away_from_bad_ones(method):
    whole = unmoved(random_branches(method.rows, 20))
    gradient, towards = take(method, whole, mismatched=(0.0,)).token_gradient, directions(whole)
    is_so = (gradient[towards > 0] < 0).all() and (gradient[towards < 0] >= 0).all()
    assert bool(is_so) == (method.name not in NOT_EVEN_AT_FIRST)


@each(BY_NAME)
def test_only_methods_with_an_aim_ever_turn_round(method):
    whole = random_branches(method.rows, 200)
    far = moved(whole, reference=whole.logps.detach() - 60 * whole.logps.detach().sin())
    pushes = -take(method, far, mismatched=MISMATCHED).token_gradient * directions(far)
    assert bool((pushes >= 0).all()) == (method.name not in AIMED)


def test_no_exception_outlives_its_method():
    assert AIMED.keys() <= METHODS.keys()
    assert METHODS.keys() >= WITHOUT_REWARDS | PER_TOKEN


@each(BY_NAME)
def test_a_method_reads_what_it_says_that_it_needs_and_nothing_else(method):
    whole = random_branches(method.rows, 3)
    elsewhere = moved(whole, reference=whole.reference - 1.5 * whole.reference.cos())
    rated = replace(whole, scores=whole.scores.exp())
    here = take(method, whole, mismatched=(0.5,))
    others = {
        "reference": take(method, elsewhere, mismatched=(0.5,)),
        "mismatched": take(method, whole, mismatched=(2.0,)),
        "scores": take(method, rated, mismatched=(0.5,)),
    }
    for need, other in others.items():
        assert torch.equal(here.losses, other.losses) != (need in method.needs), need
    assert (here.means == others["reference"].means) != ("reference" in method.needs)
    assert ("kl/raw" in here.means) == ("mismatched" in method.needs)


@each(BY_NAME)
def test_a_method_that_remembers_is_told_what_it_remembered(method):
    whole, earlier = (random_branches(method.rows, 3, seed=seed) for seed in (0, 1))
    state = take(method, earlier, mismatched=MISMATCHED).state
    fresh = take(method, whole, mismatched=MISMATCHED)
    later = take(method, whole, mismatched=MISMATCHED, state=state)
    assert state.keys() == ({method.name} if method.update_state else set())
    assert torch.equal(fresh.losses, later.losses) != bool(method.update_state)


@each(BY_NAME)
def test_a_survey_tells_one_finite_number_of_each_branch_and_no_gradient(method):
    if method.survey:
        whole = random_branches(method.rows, 3)
        for name, values in method.survey(whole, method.options()).items():
            assert values.shape == whole.logps.shape, name
            assert values.dtype == torch.float64, name
            assert values.isfinite().all(), name
            assert not values.requires_grad, name


@each(BY_NAME)
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


@each(BY_NAME)
def test_losses_and_metrics_keep_double_precision(method):
    whole = random_branches(method.rows, 3)
    taken = take(method, whole, mismatched=MISMATCHED)
    assert taken.losses.dtype == torch.float64
    assert all(values.dtype == torch.float64 for values in taken.metrics.values())
    assert len(taken.losses) == (3 if method.items == "rows" else len(whole.roles))
