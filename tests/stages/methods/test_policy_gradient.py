"""GRPO and PPO, worked by hand and beside their formulas, one token after the other."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from align.pipeline.train_checks import reading_of
from align.schemas.cache import StoredKind
from align.schemas.config import TrainOptions
from align.schemas.rows import Role
from align.stages.feed.conversions import CONVERSIONS, Own
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.policy_gradient import estimates_of, group_advantages, ppo
from align.stages.methods.table import METHODS, options_of, recipe_of
from support.method_steps import (
    Said,
    each,
    random_rows,
    rows_of,
    slopes_of,
    step_of,
    surveyed_by,
    take,
)

pytestmark = pytest.mark.numeric

PPO = METHODS["ppo"]
SIZES = (3, 1, 2, 5)
close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


def run(name, *rows, modifiers=None, **values):
    method = METHODS[name]
    options = options_of(method, values)
    return take(method, rows_of(*rows), options=options, modifiers=modifiers)


def clipped(gain, p, epsilon):
    return -min(gain * p, gain * min(max(p, 1 - epsilon), 1 + epsilon))


def grpo_oracle(rows, *, beta=0.01, epsilon=0.2, normalize="tokens", low=-np.inf, high=np.inf):
    """The loss of a step."""
    losses, by_branch = [], []
    for row in rows:
        scores = [said.score for said in row]
        mean = sum(scores) / len(scores)
        between = sum((score - mean) ** 2 for score in scores)
        spread = math.sqrt(between / (len(row) - 1)) if len(row) > 1 else 0.0
        for said in row:
            gain = (said.score - mean) / (spread + 1e-4)
            own = [
                clipped(gain, np.exp(min(max(ratio, low), high)), epsilon)
                + beta * (np.exp(-ratio) + ratio - 1)
                for ratio in said.ratios
            ]
            losses += own
            by_branch.append(np.mean(own))
    return np.mean(losses if normalize == "tokens" else by_branch)


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


def estimates(rows, *, lam=0.95, gamma=0.99, **_):
    """Whitened advantages, and returns."""
    pairs = [gae(said, lam=lam, gamma=gamma) for row in rows for said in row]
    advantages, returns = (np.concatenate(one) for one in zip(*pairs, strict=True))
    return (advantages - advantages.mean()) / np.sqrt(advantages.var() + 1e-8), returns


def ppo_oracle(
    rows, known=None, *, epsilon=0.5, lam=0.95, gamma=0.99, vf=0.01, kl=0.1, low=-99, high=99
):
    """The loss of a step; `known` advantages and returns are held."""
    gains, returns = known or estimates(rows, lam=lam, gamma=gamma)
    said = [one for row in rows for one in row]
    ratios = [ratio for one in said for ratio in one.ratios]
    values = [value for one in said for value in one.values]
    losses = [
        clipped(gain, np.exp(min(max(ratio, low), high)), epsilon)
        + vf * 0.5 * (value - target) ** 2
        + kl * ratio
        for ratio, value, gain, target in zip(ratios, values, gains, returns, strict=True)
    ]
    return np.mean(losses)


ORACLES = {"grpo": grpo_oracle, "ppo": ppo_oracle}
OPTIONS = {
    "grpo": [
        {},
        {"beta": 0.4, "epsilon": 0.05},
        {"beta": 0.0},
        {"normalize": "sequence", "beta": 0.2},
    ],
    "ppo": [
        {},
        {"epsilon": 0.1, "lam": 0.7, "gamma": 0.8, "vf": 0.6, "kl": 0.3},
        {"lam": 1.0, "gamma": 1.0, "vf": 0.0, "kl": 0.0},
    ],
}
CASES = {f"{name} {values}": (name, values) for name in OPTIONS for values in OPTIONS[name]}


@each(CASES)
def test_a_method_is_its_formula_and_humanline_clamps_the_ratio_but_not_the_distance(name, values):
    rows = random_rows(SIZES, seed=3)
    expected = ORACLES[name](rows, **values)
    assert run(name, *rows, **values).loss == pytest.approx(expected, rel=1e-11)
    humanline = Modifiers(humanline=True, log_eps_p=-0.1, log_eps_r=0.15)
    taken = run(name, *rows, modifiers=humanline, **values)
    expected = ORACLES[name](rows, **values, low=-0.1, high=0.15)
    assert taken.loss == pytest.approx(expected, rel=1e-11)
    ratios = [ratio for row in rows for said in row for ratio in said.ratios]
    inside = sum(-0.1 <= ratio <= 0.15 for ratio in ratios) / len(ratios)
    assert taken.means["humanline/unclamped"] == pytest.approx(inside)


@each(CASES)
def test_the_gradient_is_the_slope_of_the_formula(name, values):
    rows = random_rows((1, 2, 2), seed=5)
    held = {"known": estimates(rows, **values)} if name == "ppo" else {}
    taken = run(name, *rows, **values)
    for what, gradient in (("ratios", taken.token_gradient), ("values", taken.value_gradient)):
        slopes = slopes_of(rows, what, lambda nudged: ORACLES[name](nudged, **held, **values))
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-8)


def test_grpo_of_an_unmoved_policy_and_two_candidates():
    # Scores 1 and 3: mean 2, std sqrt(2 / 1) = 1.414214, A = -+1 / 1.414314 = -+.707057. At p = 1
    # a token's loss is -A: (-.707057 * 2 tokens + .707057 * 1 token) / 3.
    better, worse = Said((0.0, 0.0), score=3.0), Said((0.0,), score=1.0)
    assert run("grpo", [better, worse]).loss == pytest.approx(-0.235686, abs=5e-7)
    # Each branch's own mean counts the same: (-.707057 + .707057) / 2.
    taken = run("grpo", [better, worse], normalize="sequence")
    assert taken.loss == pytest.approx(0.0, abs=1e-15)


def test_a_ratio_is_clipped_where_it_goes_the_right_way_and_nowhere_else():
    # p = 1.5 on both sides, 1/p - 1 + log p = .666667 - 1 + .405465 = .072132, a hundredth of it.
    # Better: clipped at 1.2, -.707057 * 1.2 = -.848468. Worse: .707057 * 1.5 = 1.060585.
    up = math.log(1.5)
    taken = run("grpo", [Said((up,), score=3.0), Said((up,), score=1.0)])
    assert taken.losses.tolist() == pytest.approx([-0.847747, 1.061307], abs=1e-6)
    assert taken.metrics["clip/share"].tolist() == [1.0, 0.0]
    assert taken.means["kl/tokens"] == pytest.approx(0.072132, abs=5e-7)


def test_advantages_divide_by_the_samples_spread():
    # Scores 0, 0, 3: mean 1, std sqrt((1 + 1 + 4) / 2) = 1.732051, by 1.732151.
    whole = rows_of([Said((0.0,), score=score) for score in (0.0, 0.0, 3.0)])
    assert group_advantages(whole).tolist() == pytest.approx([-0.577317, -0.577317, 1.154634])


@pytest.mark.parametrize("scores", [(5.0,), (0.1, 0.1, 0.1)])
def test_candidates_nothing_tells_apart_have_no_advantage(scores):
    row = [Said((0.3, -0.2), score=score) for score in scores]
    assert group_advantages(rows_of(row)).abs().max() < 1e-12
    pull = 0.01 * (1 - torch.exp(-torch.tensor([0.3, -0.2], dtype=torch.float64)))
    close(run("grpo", row).token_gradient, pull.repeat(len(scores)) / (2 * len(scores)))


def test_a_group_is_compared_with_itself_only():
    one = [Said((0.0,), score=score) for score in (1.0, 2.0)]
    far = [Said((0.0,), score=score) for score in (1e6, 1e6 + 1)]
    advantages = group_advantages(rows_of(one, far))
    close(advantages[:2], advantages[2:], rtol=1e-6)


def test_accuracies_ask_whether_candidates_are_ranked_as_their_scores():
    # r is 3, 1 and 2, scores are 1, 0 and 2: 1 over 0 is right, 2 over 1 wrong, 2 over 0 right.
    row = [Said((1.5, 1.5), score=1.0), Said((1.0,), score=0.0), Said((2.0,), score=2.0)]
    taken = run("grpo", row, [Said((5.0,), score=9.0)])
    assert taken.means["rewards/accuracies"] == pytest.approx(2 / 3)
    assert taken.means["rewards/scores"] == pytest.approx(3.0)


def test_a_policy_that_moved_where_the_scores_want_it_has_gained():
    for by, has_gained in ((0.1, True), (-0.1, False)):
        taken = run("grpo", [Said((by,), score=1.0), Said((-by,), score=0.0)])
        assert (taken.means["advantages/gained"] > 0) == has_gained


# One completion of two tokens, score 1, V = (.5, .2), gamma .9, lam .5:
# d_2 = 1 - .2 = .8, d_1 = .9 * .2 - .5 = -.32; A_2 = .8, A_1 = -.32 + .45 * .8 = .04.
WORKED = Said((0.0, 0.0), score=1.0, values=(0.5, 0.2))
NUMBERS = {"gamma": 0.9, "lam": 0.5}


def test_estimates_worked_by_hand():
    found = estimates_of(rows_of([WORKED]), options_of(PPO, NUMBERS))
    assert found.advantages.tolist() == pytest.approx([0.04, 0.8])
    assert found.returns.tolist() == pytest.approx([0.54, 1.0])


def test_ppo_of_an_unmoved_policy():
    # A is .42 -+ .38: whitened -1 and 1, which cancel. (.5 - .54)^2 + (.2 - 1)^2 = .6416, half of
    # it times .01 over 2 tokens.
    taken = run("ppo", [WORKED], **NUMBERS)
    assert taken.loss == pytest.approx(0.001604, abs=5e-10)
    # vf (V - R) / 2 of each token.
    assert taken.value_gradient.tolist() == pytest.approx([-0.0002, -0.004])
    # (kl - A) / 2 of each token.
    assert taken.token_gradient.tolist() == pytest.approx([0.55, -0.45], rel=1e-6)
    assert taken.means["values/mean"] == pytest.approx(0.35)
    assert taken.means["values/errors"] == pytest.approx(0.42)


def test_labels_are_scores_of_one_and_minus_one():
    rules = reading_of(recipe_of("ppo", {}), TrainOptions(), policy="").rules
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
    taken = run("ppo", row)
    assert taken.loss == pytest.approx(0.00453125, abs=1e-12)
    assert taken.value_gradient.tolist() == pytest.approx([-0.0025, 0.00625])  # vf (V - R) / 2
    assert recipe_of("grpo", {}).bad_score == 0.0


def test_a_value_learns_from_a_return_that_is_near_enough():
    # Errors .04 and .8; the second is held to .1.
    taken = run("ppo", [WORKED], **NUMBERS, value_clip=0.1)
    assert taken.value_gradient.tolist() == pytest.approx([-0.0002, -0.0005])
    assert taken.loss == pytest.approx(0.01 * 0.5 * (0.04**2 + 0.1**2) / 2, abs=1e-9)


def test_scores_far_from_zero_are_whitened_as_exactly():
    rows = random_rows(SIZES, seed=2)
    still = [[replace(said, values=(0.0,) * len(said.ratios)) for said in row] for row in rows]
    far = [[replace(said, score=said.score + 1e7) for said in row] for row in still]
    options = {"vf": 0.0, "gamma": 1.0, "lam": 1.0}
    one, other = (run("ppo", *some, **options) for some in (still, far))
    assert one.loss == pytest.approx(other.loss, rel=1e-7)


def test_what_whitens_is_of_the_survey_and_what_is_whitened_of_the_pass_that_learns():
    whole, recipe = rows_of(*random_rows((2, 3), seed=4)), recipe_of("ppo", {})
    (options,) = (part.options for part in recipe.parts)
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


def test_a_single_token_has_nothing_to_be_compared_with():
    taken = run("ppo", [Said((0.4,), score=3.0, values=(1.0,))])
    assert taken.loss == pytest.approx(0.01 * 0.5 * 2.0**2 + 0.1 * 0.4)


def test_thousands_of_tokens_are_discounted_like_a_few():
    count = 3000
    said = Said((0.0,) * count, score=1.0, values=tuple(math.sin(i) for i in range(count)))
    advantages, returns = gae(said, lam=0.95, gamma=0.99)
    short = Said((0.0,), score=2.0, values=(0.5,))
    found = estimates_of(rows_of([said, short]), options_of(PPO, {}))
    assert found.advantages.tolist() == pytest.approx([*advantages, 1.5], rel=1e-9, abs=1e-12)
    assert found.returns.tolist() == pytest.approx([*returns, 2.0], rel=1e-9, abs=1e-12)
