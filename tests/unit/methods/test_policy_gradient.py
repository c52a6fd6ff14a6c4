"""GRPO and PPO, worked by hand and beside their formulas, one token after the other."""

import math
from dataclasses import replace

import numpy as np
import pytest

from align.pipeline.plan.cache_checks import read_spec_of
from align.schemas.train_options import TrainOptions
from align.stages.methods.losses import estimated, standardized
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.table import METHODS, objective_of, options_of
from support.method_steps import Said, each, random_rows, rows_of, take

pytestmark = pytest.mark.numeric

SIZES = (3, 1, 2, 5)


def run(name, *rows, modifiers=None, **values):
    method = METHODS[name]
    options = options_of(method, values)
    return take(method, rows_of(*rows), options=options, modifiers=modifiers)


def clipped(gain, p, epsilon):
    return -min(gain * p, gain * min(max(p, 1 - epsilon), 1 + epsilon))


def gains_of(scores, *, std="sample", std_epsilon=1e-4):
    """The advantage of each candidate of a prompt."""
    mean = sum(scores) / len(scores)
    between = sum((score - mean) ** 2 for score in scores)
    over = {"sample": max(1, len(scores) - 1), "population": len(scores)}
    by = 1.0 if std == "none" else math.sqrt(between / over[std]) + std_epsilon
    return [(score - mean) / by for score in scores]


def grpo_oracle(
    rows, *, beta=0.01, epsilon=0.2, normalize="tokens", low=-np.inf, high=np.inf, **of_gains
):
    """The loss of a step."""
    losses, by_completion = [], []
    for row in rows:
        gains = gains_of([said.score for said in row], **of_gains)
        for said, gain in zip(row, gains, strict=True):
            own = [
                clipped(gain, np.exp(min(max(ratio, low), high)), epsilon)
                + beta * (np.exp(-ratio) + ratio - 1)
                for ratio in said.ratios
            ]
            losses += own
            by_completion.append(np.mean(own))
    return np.mean(losses if normalize == "tokens" else by_completion)


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


def estimates(rows, *, lam=0.95, gamma=0.99, value_target="gae", **_):
    """Whitened advantages, and returns."""
    pairs = [gae(said, lam=lam, gamma=gamma) for row in rows for said in row]
    advantages, returns = (np.concatenate(one) for one in zip(*pairs, strict=True))
    if value_target == "return":  # the score, so many tokens before the last one
        said = [(one.score, len(one.values)) for row in rows for one in row]
        returns = np.array([s * gamma ** (n - 1 - at) for s, n in said for at in range(n)])
    return (advantages - advantages.mean()) / np.sqrt(advantages.var() + 1e-8), returns


def ppo_oracle(rows, known=None, *, epsilon=0.5, vf=0.01, kl=0.1, low=-99, high=99, **of_estimates):
    """The loss of a step; `known` advantages and returns are held."""
    gains, returns = known or estimates(rows, **of_estimates)
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
CASES = [
    ("grpo", {}),
    ("grpo", {"beta": 0.4, "epsilon": 0.05}),
    ("grpo", {"beta": 0.0}),
    ("grpo", {"normalize": "sequence", "beta": 0.2}),
    ("grpo", {"std": "population", "std_epsilon": 1e-2}),  # as HALOs has them
    ("grpo", {"std": "none", "beta": 0.3}),
    ("ppo", {}),
    ("ppo", {"value_target": "return", "gamma": 0.8, "vf": 0.6}),
    ("ppo", {"epsilon": 0.1, "lam": 0.7, "gamma": 0.8, "vf": 0.6, "kl": 0.3}),
    ("ppo", {"lam": 1.0, "gamma": 1.0, "vf": 0.0, "kl": 0.0}),
]


def moved_by(rows, what, by):
    """The rows, this number of each token changed by so much."""
    left = iter(by)
    return [
        [
            replace(said, **{what: tuple(x + next(left) for x in getattr(said, what))})
            for said in row
        ]
        for row in rows
    ]


@each({f"{name} {values}": (name, values) for name, values in CASES})
def test_loss_and_gradient_are_the_formula_and_its_slope(name, values):
    rows = random_rows(SIZES, seed=3)
    taken = run(name, *rows, **values)
    assert taken.loss == pytest.approx(ORACLES[name](rows, **values), rel=1e-11)
    held = {"known": estimates(rows, **values)} if name == "ppo" else {}
    for what, gradient in (("ratios", taken.token_gradient), ("values", taken.value_gradient)):
        ways = np.random.default_rng(1).normal(size=len(gradient))
        above, below = (
            ORACLES[name](moved_by(rows, what, by * ways), **held, **values) for by in (1e-6, -1e-6)
        )
        slope = (above - below) / 2e-6
        assert gradient.numpy() @ ways == pytest.approx(slope, rel=1e-5, abs=1e-8)
    # Humanline clamps the ratio, but not the distance from the reference.
    humanline = Modifiers(humanline=True, log_eps_p=-0.1, log_eps_r=0.15)
    taken = run(name, *rows, modifiers=humanline, **values)
    expected = ORACLES[name](rows, **values, low=-0.1, high=0.15)
    assert taken.loss == pytest.approx(expected, rel=1e-11)
    ratios = [ratio for row in rows for said in row for ratio in said.ratios]
    inside = sum(-0.1 <= ratio <= 0.15 for ratio in ratios) / len(ratios)
    assert taken.means["humanline/unclamped"] == pytest.approx(inside)


def test_a_ratio_is_clipped_where_it_goes_the_right_way_and_nowhere_else():
    # Scores 1 and 3: mean 2, std sqrt(2 / 1) = 1.414214, A = -+1 / 1.414314 = -+.707057.
    # p = 1.5 on both sides, 1/p - 1 + log p = .666667 - 1 + .405465 = .072132, a hundredth of it.
    # Better: clipped at 1.2, -.707057 * 1.2 = -.848468. Worse: .707057 * 1.5 = 1.060585.
    up = math.log(1.5)
    taken = run("grpo", [Said((up,), score=3.0), Said((up,), score=1.0)])
    assert taken.losses.tolist() == pytest.approx([-0.847747, 1.061307], abs=1e-6)
    assert taken.values["clip/share"].tolist() == [1.0, 0.0]
    assert taken.means["kl/tokens"] == pytest.approx(0.072132, abs=5e-7)
    # The population's std is 1, and A -+1 / 1.01 = -+.990099; by no std it is -+1.
    for std, better, worse in (("population", -1.187397, 1.485870), ("none", -1.199279, 1.500721)):
        pair = [Said((up,), score=3.0), Said((up,), score=1.0)]
        taken = run("grpo", pair, std=std, std_epsilon=0.01)
        assert taken.losses.tolist() == pytest.approx([better, worse], abs=1e-6)


def test_candidates_nothing_tells_apart_have_no_advantage():
    for scores in ((5.0,), (0.1, 0.1, 0.1)):  # whose mean is not 0.1 in binary
        row = [Said((0.3, -0.2), score=score) for score in scores]
        whole = rows_of(row)
        assert standardized(whole.scores, whole.rows, "sample", 1e-4).abs().max() < 1e-12


def test_accuracies_and_gains_tell_whether_candidates_are_ranked_as_their_scores():
    # r is 3, 1 and 2, scores are 1, 0 and 2: 1 over 0 is right, 2 over 1 wrong, 2 over 0 right.
    row = [Said((1.5, 1.5), score=1.0), Said((1.0,), score=0.0), Said((2.0,), score=2.0)]
    taken = run("grpo", row, [Said((5.0,), score=9.0)])
    assert taken.means["rewards/accuracies"] == pytest.approx(2 / 3)
    assert taken.means["rewards/scores"] == pytest.approx(3.0)
    for by, has_gained in ((0.1, True), (-0.1, False)):
        taken = run("grpo", [Said((by,), score=1.0), Said((-by,), score=0.0)])
        assert (taken.means["advantages/gained"] > 0) == has_gained


# One completion of two tokens, score 1, V = (.5, .2), gamma .9, lam .5: A_2 = 1 - .2 = .8,
# d_1 = .9 * .2 - .5 = -.32, A_1 = -.32 + .45 * .8 = .04; R = A + V = (.54, 1).
WORKED = Said((0.0, 0.0), score=1.0, values=(0.5, 0.2))
NUMBERS = {"gamma": 0.9, "lam": 0.5}


def test_ppo_of_an_unmoved_policy():
    # A is .42 -+ .38: whitened -1 and 1, which cancel. (.5 - .54)^2 + (.2 - 1)^2 = .6416, half of
    # it times .01 over 2 tokens.
    taken = run("ppo", [WORKED], **NUMBERS)
    assert taken.loss == pytest.approx(0.001604, abs=5e-10)
    # vf (V - R) / 2 and (kl - A) / 2 of each token.
    assert taken.value_gradient.tolist() == pytest.approx([-0.0002, -0.004])
    assert taken.token_gradient.tolist() == pytest.approx([0.55, -0.45], rel=1e-6)
    assert taken.means["values/mean"] == pytest.approx(0.35)
    assert taken.means["values/errors"] == pytest.approx(0.42)
    # A value learns from a return that is near enough: of errors .04 and .8 one is held to .1.
    taken = run("ppo", [WORKED], **NUMBERS, value_clip=0.1)
    assert taken.value_gradient.tolist() == pytest.approx([-0.0002, -0.0005])
    assert taken.loss == pytest.approx(0.01 * 0.5 * (0.04**2 + 0.1**2) / 2, abs=1e-9)
    # The discounted score alone is (.9, 1); the advantages stay.
    taken = run("ppo", [WORKED], **NUMBERS, value_target="return")
    assert taken.value_gradient.tolist() == pytest.approx([-0.002, -0.004])
    assert taken.token_gradient.tolist() == pytest.approx([0.55, -0.45], rel=1e-6)
    # A single token has nothing to be compared with.
    taken = run("ppo", [Said((0.4,), score=3.0, values=(1.0,))])
    assert taken.loss == pytest.approx(0.01 * 0.5 * 2.0**2 + 0.1 * 0.4)


def test_a_bad_label_is_a_score_of_minus_one_to_ppo_and_of_nought_to_grpo():
    for name, score in (("ppo", -1.0), ("grpo", 0.0)):
        reading = read_spec_of(objective_of(name, {}), TrainOptions(), policy="")
        assert reading.rules.bad_score == score


def test_scores_far_from_zero_are_whitened_as_exactly():
    rows = random_rows(SIZES, seed=2)
    still = [[replace(said, values=(0.0,) * len(said.ratios)) for said in row] for row in rows]
    far = [[replace(said, score=said.score + 1e7) for said in row] for row in still]
    options = {"vf": 0.0, "gamma": 1.0, "lam": 1.0}
    one, other = (run("ppo", *some, **options) for some in (still, far))
    assert one.loss == pytest.approx(other.loss, rel=1e-7)


def test_thousands_of_tokens_are_discounted_like_a_few():
    count = 3000
    said = Said((0.0,) * count, score=1.0, values=tuple(math.sin(i) for i in range(count)))
    advantages, returns = gae(said, lam=0.95, gamma=0.99)
    short = Said((0.0,), score=2.0, values=(0.5,))
    found = estimated(rows_of([said, short]), lam=0.95, gamma=0.99)
    assert found[0].tolist() == pytest.approx([*advantages, 1.5], rel=1e-9, abs=1e-12)
    assert found[1].tolist() == pytest.approx([*returns, 2.0], rel=1e-9, abs=1e-12)
