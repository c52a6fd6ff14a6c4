import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.schemas.errors import UsageError
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.policy_gradient import group_advantages
from align.stages.methods.table import METHODS, options_of
from support.method_steps import take
from support.token_steps import Said, random_rows, rows_of, slopes_of

pytestmark = pytest.mark.numeric

GRPO = METHODS["grpo"]
SIZES = (3, 1, 2, 5)
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def run(*rows, modifiers=None, cuts=(), **values):
    return take(
        GRPO, rows_of(*rows), options=options_of(GRPO, values), modifiers=modifiers, cuts=cuts
    )


def oracle(rows, *, beta=0.01, epsilon=0.2, normalize="tokens", low=-np.inf, high=np.inf):
    """The loss of a step, one token after the other."""
    losses, by_branch = [], []
    for row in rows:
        scores = [said.score for said in row]
        mean = sum(scores) / len(scores)
        between = sum((score - mean) ** 2 for score in scores)
        spread = math.sqrt(between / (len(row) - 1)) if len(row) > 1 else 0.0
        for said in row:
            gain = (said.score - mean) / (spread + 1e-4)
            own = []
            for ratio in said.ratios:
                p = np.exp(min(max(ratio, low), high))
                limited = min(max(p, 1 - epsilon), 1 + epsilon)
                distance = np.exp(-ratio) + ratio - 1
                own.append(-min(gain * p, gain * limited) + beta * distance)
            losses += own
            by_branch.append(np.mean(own))
    return np.mean(losses if normalize == "tokens" else by_branch)


def test_an_unmoved_policy_of_two_candidates():
    # Scores 1 and 3: mean 2, std sqrt(2 / 1) = 1.414214, A = -+1 / 1.414314 = -+.707057. At p = 1
    # a token's loss is -A: (-.707057 * 2 tokens + .707057 * 1 token) / 3.
    better, worse = Said((0.0, 0.0), score=3.0), Said((0.0,), score=1.0)
    assert run([better, worse]).loss == pytest.approx(-0.235686, abs=5e-7)
    # Each branch's own mean counts the same: (-.707057 + .707057) / 2.
    assert run([better, worse], normalize="sequence").loss == pytest.approx(0.0, abs=1e-15)


def test_a_ratio_is_clipped_where_it_goes_the_right_way_and_nowhere_else():
    # p = 1.5 on both sides, 1/p - 1 + log p = .666667 - 1 + .405465 = .072132, a hundredth of it.
    # Better: clipped at 1.2, -.707057 * 1.2 = -.848468. Worse: .707057 * 1.5 = 1.060585.
    up = math.log(1.5)
    better, worse = Said((up,), score=3.0), Said((up,), score=1.0)
    taken = run([better, worse])
    assert taken.losses.tolist() == pytest.approx([-0.847747, 1.061307], abs=1e-6)
    assert taken.metrics["clip/share"].tolist() == [1.0, 0.0]
    assert taken.means["kl/tokens"] == pytest.approx(0.072132, abs=5e-7)


def test_advantages_divide_by_the_samples_spread():
    # Scores 0, 0, 3: mean 1, std sqrt((1 + 1 + 4) / 2) = 1.732051, by 1.732151.
    whole = rows_of([Said((0.0,), score=score) for score in (0.0, 0.0, 3.0)])
    assert group_advantages(whole).tolist() == pytest.approx([-0.577317, -0.577317, 1.154634])


@pytest.mark.parametrize("scores", [(5.0,), (0.1, 0.1, 0.1)])
def test_candidates_nothing_tells_apart_have_no_advantage(scores):
    whole = rows_of([Said((0.3, -0.2), score=score) for score in scores])
    assert group_advantages(whole).abs().max() < 1e-12
    taken = take(GRPO, whole)
    pull = 0.01 * (1 - torch.exp(-torch.tensor([0.3, -0.2], dtype=torch.float64)))
    close(taken.token_gradient, pull.repeat(len(scores)) / (2 * len(scores)))


def test_a_group_is_compared_with_itself_only():
    one = [Said((0.0,), score=score) for score in (1.0, 2.0)]
    far = [Said((0.0,), score=score) for score in (1e6, 1e6 + 1)]
    advantages = group_advantages(rows_of(one, far))
    close(advantages[:2], advantages[2:], rtol=1e-6)


OPTIONS = [
    {},
    {"beta": 0.4, "epsilon": 0.05},
    {"beta": 0.0},
    {"normalize": "sequence", "beta": 0.2},
]


@pytest.mark.parametrize("values", OPTIONS)
def test_grpo_is_its_formula(values):
    rows = random_rows(SIZES)
    assert run(*rows, **values).loss == pytest.approx(oracle(rows, **values), rel=1e-12)


@pytest.mark.parametrize("values", OPTIONS)
def test_humanline_clamps_the_ratio_and_not_the_distance(values):
    rows = random_rows(SIZES, seed=3)
    modifiers = Modifiers(humanline=True, log_eps_p=-0.1, log_eps_r=0.15)
    taken = run(*rows, modifiers=modifiers, **values)
    expected = oracle(rows, **values, low=-0.1, high=0.15)
    assert taken.loss == pytest.approx(expected, rel=1e-12)
    ratios = [ratio for row in rows for said in row for ratio in said.ratios]
    inside = sum(-0.1 <= ratio <= 0.15 for ratio in ratios) / len(ratios)
    assert taken.means["humanline/unclamped"] == pytest.approx(inside)


@pytest.mark.parametrize("values", OPTIONS)
def test_the_gradient_is_the_slope_of_the_formula(values):
    rows = random_rows((1, 2, 2), seed=5)
    slopes = slopes_of(rows, "ratios", lambda nudged: oracle(nudged, **values))
    gradient = run(*rows, **values).token_gradient
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-8)


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=7),
    seed=st.integers(0, 99),
    normalize=st.sampled_from(["tokens", "sequence"]),
    data=st.data(),
)
def test_any_way_to_cut_a_step_gives_the_same(sizes, seed, normalize, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sizes)), max_size=4)))
    rows = random_rows(sizes, seed)
    once, cut = (run(*rows, normalize=normalize, cuts=edges) for edges in ((), cuts))
    close(once.losses, cut.losses)
    close(once.token_gradient, cut.token_gradient)
    close(once.metrics, cut.metrics)
    assert once.loss == pytest.approx(once.reported, rel=1e-12)


def test_tokens_of_better_candidates_go_up_and_of_worse_ones_down():
    still = [Said((0.0,) * 3, score=score) for score in (1.0, 4.0, -2.0)]
    gradient = run(still).token_gradient.view(3, 3)
    assert (gradient[1] < 0).all()
    assert (gradient[2] > 0).all()
    assert gradient[0].abs().max() < 1e-12


@pytest.mark.parametrize("normalize", ["tokens", "sequence"])
def test_ten_thousand_nats_away_all_is_finite(normalize):
    ends = (1e4, -1e4, 0.0)
    rows = [[Said((end,) * 2, score=score) for end in ends for score in (1e4, -1e4, 0.0)]]
    taken = run(*rows, normalize=normalize)
    assert taken.losses.isfinite().all()
    assert taken.token_gradient.isfinite().all()
    assert all(values.isfinite().all() for values in taken.metrics.values())


def test_a_micro_batch_without_rows_gives_nothing():
    taken = run()
    assert taken.losses.shape == (0,)
    assert taken.loss == 0.0
    assert taken.means == {}


def test_accuracies_ask_whether_candidates_are_ranked_as_their_scores():
    # r is 3, 1 and 2, scores are 1, 0 and 2: 1 over 0 is right, 2 over 1 wrong, 2 over 0 right.
    row = [Said((1.5, 1.5), score=1.0), Said((1.0,), score=0.0), Said((2.0,), score=2.0)]
    alone = [Said((5.0,), score=9.0)]
    taken = run(row, alone)
    assert taken.means["rewards/accuracies"] == pytest.approx(2 / 3)
    assert taken.means["rewards/scores"] == pytest.approx(3.0)
    assert taken.metrics["rewards/accuracies"].dtype == torch.float64


def test_a_policy_that_moved_where_the_scores_want_it_has_gained():
    up, down = Said((0.1,), score=1.0), Said((-0.1,), score=0.0)
    assert run([up, down]).means["advantages/gained"] > 0
    up, down = Said((-0.1,), score=1.0), Said((0.1,), score=0.0)
    assert run([up, down]).means["advantages/gained"] < 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epsilon": 0}, "method.epsilon: expected a number above 0 and below 1, found 0"),
        ({"epsilon": 1.5}, "expected a number above 0 and below 1, found 1.5"),
        ({"beta": -0.1}, "method.beta: expected a number of at least 0, found -0.1"),
        ({"normalize": "token"}, "expected tokens or sequence, found 'token'"),
    ],
)
def test_what_grpo_refuses(values, said):
    with pytest.raises(UsageError) as refusal:
        options_of(GRPO, values)
    assert said in str(refusal.value)
