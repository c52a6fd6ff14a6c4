import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.pipeline.train_checks import reading_of
from align.schemas.cache import StoredKind
from align.schemas.config import TrainOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Role
from align.stages.feed.conversions import CONVERSIONS, Own
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.policy_gradient import estimates_of, ppo
from align.stages.methods.recipe import Part, Recipe
from align.stages.methods.table import METHODS, options_of, recipe_of
from support.method_steps import step_of, surveyed_by, take
from support.token_steps import Said, random_rows, rows_of, slopes_of

pytestmark = pytest.mark.numeric

PPO = METHODS["ppo"]
SIZES = (3, 1, 2, 4)
close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


def run(*rows, modifiers=None, cuts=(), **values):
    return take(
        PPO, rows_of(*rows), options=options_of(PPO, values), modifiers=modifiers, cuts=cuts
    )


def gae(said, *, lam, gamma):
    """Advantages and returns of one completion, from its last token back."""
    advantages, returns, behind, value_behind = [], [], 0.0, 0.0
    for place in reversed(range(len(said.values))):
        reward = said.score if place == len(said.values) - 1 else 0.0
        behind = reward + gamma * value_behind - said.values[place] + gamma * lam * behind
        value_behind = said.values[place]
        advantages.insert(0, behind)
        returns.insert(0, behind + value_behind)
    return advantages, returns


def estimates(rows, lam=0.95, gamma=0.99):
    pairs = [gae(said, lam=lam, gamma=gamma) for row in rows for said in row]
    advantages, returns = (np.concatenate(one) for one in zip(*pairs, strict=True))
    return (advantages - advantages.mean()) / np.sqrt(advantages.var() + 1e-8), returns


def oracle(
    rows, known=None, *, epsilon=0.5, lam=0.95, gamma=0.99, vf=0.01, kl=0.1, low=-99, high=99
):
    """The loss of a step, one token after the other; `known` advantages and returns are held."""
    gains, returns = known or estimates(rows, lam, gamma)
    said = [one for row in rows for one in row]
    ratios = [ratio for one in said for ratio in one.ratios]
    values = [value for one in said for value in one.values]
    losses = []
    for ratio, value, gain, target in zip(ratios, values, gains, returns, strict=True):
        p = np.exp(min(max(ratio, low), high))
        limited = min(max(p, 1 - epsilon), 1 + epsilon)
        policy = max(-gain * p, -gain * limited)
        losses.append(policy + vf * 0.5 * (value - target) ** 2 + kl * ratio)
    return np.mean(losses)


# One completion of two tokens, score 1, V = (.5, .2), gamma .9, lam .5:
# d_2 = 1 - .2 = .8, d_1 = .9 * .2 - .5 = -.32; A_2 = .8, A_1 = -.32 + .45 * .8 = .04.
WORKED = Said((0.0, 0.0), score=1.0, values=(0.5, 0.2))
NUMBERS = {"gamma": 0.9, "lam": 0.5}


def test_estimates_worked_by_hand():
    found = estimates_of(rows_of([WORKED]), options_of(PPO, NUMBERS))
    assert found.advantages.tolist() == pytest.approx([0.04, 0.8])
    assert found.returns.tolist() == pytest.approx([0.54, 1.0])


def test_the_loss_of_an_unmoved_policy():
    # A is .42 -+ .38: whitened -1 and 1, which cancel. (.5 - .54)^2 + (.2 - 1)^2 = .6416, half of
    # it times .01 over 2 tokens.
    taken = run([WORKED], **NUMBERS)
    assert taken.loss == pytest.approx(0.001604, abs=5e-10)
    # vf (V - R) / 2 of each token.
    assert taken.value_gradient.tolist() == pytest.approx([-0.0002, -0.004])
    # (kl - A) / 2 of each token.
    assert taken.token_gradient.tolist() == pytest.approx([0.55, -0.45], rel=1e-6)
    assert taken.means["values/mean"] == pytest.approx(0.35)
    assert taken.means["values/errors"] == pytest.approx(0.42)


def test_labels_are_scores_of_one_and_minus_one():
    recipe = Recipe((Part(PPO, options_of(PPO, {})),))
    rules = reading_of(recipe, TrainOptions(), policy="").rules
    nan = np.full(2, np.nan)
    pair = np.array([Role.CHOSEN, Role.REJECTED], dtype=np.int8)
    own = Own(np.array([0]), np.array([0, 2]), np.array([0, 1]), pair, nan)
    scores = CONVERSIONS["grouped"][StoredKind.PAIRED](own, rules).scores.tolist()
    assert scores == [1.0, -1.0]
    # Of one token each, V = (.5, .25): R is the score, A .5 and -1.25, whitened 1 and -1, which
    # cancel at p = 1. (.25 + 1.5625) / 2 times .01 over 2 tokens.
    row = [
        Said((0.0,), score=score, values=(value,))
        for score, value in zip(scores, (0.5, 0.25), strict=True)
    ]
    taken = run(row)
    assert taken.loss == pytest.approx(0.00453125, abs=1e-12)
    assert taken.value_gradient.tolist() == pytest.approx([-0.0025, 0.00625])  # vf (V - R) / 2
    assert recipe_of("grpo", {}).bad_score == 0.0


def test_a_value_learns_from_a_return_that_is_near_enough():
    # Errors .04 and .8; the second is held to .1.
    taken = run([WORKED], **NUMBERS, value_clip=0.1)
    assert taken.value_gradient.tolist() == pytest.approx([-0.0002, -0.0005])
    assert taken.loss == pytest.approx(0.01 * 0.5 * (0.04**2 + 0.1**2) / 2, abs=1e-9)


def test_lam_one_is_the_discounted_reward_and_lam_zero_looks_one_token_ahead():
    (said,) = row = random_rows((1,), seed=8)[0]
    count = len(said.ratios)
    assert count > 2
    sure = estimates_of(rows_of(row), options_of(PPO, {"lam": 1, "gamma": 0.9}))
    assert sure.returns.tolist() == pytest.approx(
        [said.score * 0.9 ** (count - 1 - place) for place in range(count)]
    )
    near = estimates_of(rows_of(row), options_of(PPO, {"lam": 0, "gamma": 0.9}))
    following = [*(0.9 * value for value in said.values[1:]), said.score]
    assert near.returns.tolist() == pytest.approx(following)


OPTIONS = [
    {},
    {"epsilon": 0.1, "lam": 0.7, "gamma": 0.8, "vf": 0.6, "kl": 0.3},
    {"lam": 1.0, "gamma": 1.0, "vf": 0.0, "kl": 0.0},
]


@pytest.mark.parametrize("values", OPTIONS)
def test_ppo_is_its_formula(values):
    rows = random_rows(SIZES)
    assert run(*rows, **values).loss == pytest.approx(oracle(rows, **values), rel=1e-11)


@pytest.mark.parametrize("values", OPTIONS)
def test_humanline_clamps_the_ratio_and_not_the_distance(values):
    rows = random_rows(SIZES, seed=3)
    modifiers = Modifiers(humanline=True, log_eps_p=-0.1, log_eps_r=0.15)
    expected = oracle(rows, **values, low=-0.1, high=0.15)
    assert run(*rows, modifiers=modifiers, **values).loss == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("values", OPTIONS)
def test_the_gradient_is_the_slope_of_the_formula(values):
    rows = random_rows((1, 2, 2), seed=5)
    known = estimates(rows, **{name: values[name] for name in ("lam", "gamma") if name in values})
    taken = run(*rows, **values)
    for name, gradient in (("ratios", taken.token_gradient), ("values", taken.value_gradient)):
        slopes = slopes_of(rows, name, lambda nudged: oracle(nudged, known, **values))
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-8)


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=7),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_way_to_cut_a_step_gives_the_same(sizes, seed, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sizes)), max_size=4)))
    rows = random_rows(sizes, seed)
    once, cut = (run(*rows, cuts=edges) for edges in ((), cuts))
    close(once.losses, cut.losses)
    close(once.token_gradient, cut.token_gradient)
    close(once.value_gradient, cut.value_gradient)
    close(once.metrics, cut.metrics)
    assert once.loss == pytest.approx(once.reported, rel=1e-12)


def test_scores_far_from_zero_are_whitened_as_exactly():
    rows = random_rows(SIZES, seed=2)
    still = [[replace(said, values=(0.0,) * len(said.ratios)) for said in row] for row in rows]
    far = [[replace(said, score=said.score + 1e7) for said in row] for row in still]
    options = {"vf": 0.0, "gamma": 1.0, "lam": 1.0}
    one, other = (run(*some, **options) for some in (still, far))
    assert one.loss == pytest.approx(other.loss, rel=1e-7)


def test_what_whitens_is_of_the_survey_and_what_is_whitened_of_the_pass_that_learns():
    rows = random_rows((2, 3), seed=4)
    whole, options = rows_of(*rows), options_of(PPO, {})
    recipe = Recipe((Part(PPO, options),))
    found = recipe.survey(whole)
    assert not any(values.requires_grad for values in found.values())
    step = step_of(whole, surveyed=surveyed_by(recipe, [whole]))
    own = {name.removeprefix("ppo/"): values for name, values in step.surveyed.items()}
    # As if dropout had made all values of the learning pass 1 lower: A moves, mean and std do not.
    lower = replace(whole, tokens=replace(whole.tokens, values=whole.tokens.values.detach() - 1))
    one, other = (
        ppo(given, replace(step, surveyed=own), options).metrics["advantages/gained"]
        for given in (whole, lower)
    )
    spread = np.sqrt(np.var(estimates_of(whole, options).advantages.numpy()) + 1e-8)
    moved = estimates_of(lower, options).advantages - estimates_of(whole, options).advantages
    close(other - one, moved / spread * (whole.tokens.log_ratios.detach().exp() - 1))


def test_a_better_than_average_completion_goes_up_and_a_worse_one_down():
    row = [Said((0.0,) * 3, score=score, values=(0.0,) * 3) for score in (2.0, -2.0)]
    gradient = run(row, kl=0.0).token_gradient
    assert (gradient[:3] < 0).all()
    assert (gradient[3:] > 0).all()


def test_a_single_token_has_nothing_to_be_compared_with():
    taken = run([Said((0.4,), score=3.0, values=(1.0,))])
    assert taken.loss == pytest.approx(0.01 * 0.5 * 2.0**2 + 0.1 * 0.4)


def test_ten_thousand_nats_and_points_away_all_is_finite():
    ends = (1e4, -1e4, 0.0)
    row = [
        Said((end,) * 3, score=score, values=(value,) * 3)
        for end in ends
        for score in ends
        for value in ends
    ]
    taken = run(row)
    for values in (taken.losses, taken.token_gradient, taken.value_gradient):
        assert values.isfinite().all()
    assert all(values.isfinite().all() for values in taken.metrics.values())


def test_a_micro_batch_without_rows_gives_nothing():
    taken = run()
    assert taken.losses.shape == (0,)
    assert taken.loss == 0.0
    assert taken.means == {}


def test_thousands_of_tokens_are_discounted_like_a_few():
    count = 3000
    said = Said((0.0,) * count, score=1.0, values=tuple(math.sin(i) for i in range(count)))
    advantages, returns = gae(said, lam=0.95, gamma=0.99)
    short = Said((0.0,), score=2.0, values=(0.5,))
    found = estimates_of(rows_of([said, short]), options_of(PPO, {}))
    assert found.advantages.tolist() == pytest.approx([*advantages, 1.5], rel=1e-9, abs=1e-12)
    assert found.returns.tolist() == pytest.approx([*returns, 2.0], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lam": 1.1}, "method.lam: expected a number of at least 0 and at most 1, found 1.1"),
        ({"gamma": -0.1}, "method.gamma: expected a number of at least 0 and at most 1, found"),
        ({"epsilon": 1}, "expected a number above 0 and below 1, found 1"),
        ({"value_clip": -1}, "method.value_clip: expected a number of at least 0, found -1"),
    ],
)
def test_what_ppo_refuses(values, said):
    with pytest.raises(UsageError) as refusal:
        options_of(PPO, values)
    assert said in str(refusal.value)
