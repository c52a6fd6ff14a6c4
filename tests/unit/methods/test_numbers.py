"""Losses, and what is reported of them, worked out by hand."""

import math

import pytest
import torch

from align.schemas.rows import Role
from align.stages.methods.losses import control_texts, log1mexp, log_odds
from align.stages.methods.table import METHODS, options_of
from support.method_steps import IN_USE, LABELS, PAIR, completions, each, pair, take

pytestmark = pytest.mark.numeric

CsftOptions = METHODS["csft"].options
Z = (0.25, 0.75)  # mismatched log-ratios: the zero point of kto is .5


def run(name, whole, *, mismatched=Z, modifiers=None, **values):
    method = METHODS[name]
    options = options_of(method, values)
    return take(method, whole, mismatched=mismatched, options=options, modifiers=modifiers)


def labelled(*pairs):
    """Completions of (label, log-ratio)."""
    roles = {"+": Role.DESIRABLE, "-": Role.UNDESIRABLE}
    return completions([ratio for _, ratio in pairs], roles=[roles[label] for label, _ in pairs])


def paired(*rows, reference=(), num_tokens=None):
    """Rows of the log-probs of a chosen and a rejected completion, and of the reference's."""
    flat = [[logp for row in some for logp in row] for some in (rows, reference)]
    return completions(*flat, num_tokens=num_tokens, roles=PAIR * len(rows))


TEN = pair(-8.0, -36.0, reference=(-12.0, -30.0), num_tokens=(4, 9))  # r_c = 4, r_l = -6
ANCHORED = pair(5.0, -10.0)  # b r: S(.5) = .622459, S(-1) = .268941, S(1.5) = .817574
SCORED = pair(4.0, -6.0, scores=(2.0, 0.5))  # b D = 1; the scores differ by 1.5
LIKELY = pair(-4.0, -14.0, num_tokens=(2, 5))  # lp_c - lp_l = 10
GOOD, BAD = labelled(("+", 2.0), ("+", 2.0)), labelled(("-", -3.0), ("-", -3.0))
BOTH = labelled(("+", 2.0), ("-", -3.0))
RANKED = paired((-1.0, -4.0), (-5.0, -3.0), reference=[(-9.0, -3.0), (-2.0, -3.0)])
BY_HAND = [
    ("dpo", {}, TEN, 0.313262),  # -LS(.1 * 10) = ln(1 + e^-1)
    ("dpo", {"label_smoothing": 0.2}, TEN, 0.513262),  # a fifth of -LS(-1) = that + 1
    ("dpo", {"sft_weight": 0.5}, TEN, 1.313262),  # and half of 8 nats over 4 tokens
    ("dpo", {"sft_weight": 0.5, "sft_normalize": "sum"}, TEN, 4.313262),  # half of 8 nats
    ("cdpo", {}, TEN, 0.513262),
    ("robust", {}, TEN, 0.188262),  # (.9 * .313262 - .1 * 1.313262) / .8
    ("exo", {}, TEN, 1.276310),  # S(1) (-.313262 + .001001) + S(-1) (-1.313262 + 6.907755)
    ("hinge", {}, pair(4.0, -2.0), 0.4),  # 1 - .1 * 6
    ("hinge", {}, pair(6.0, -6.0), 0.0),
    ("ipo", {}, pair(4.0, -6.0, num_tokens=(4, 3)), 4.0),  # (4 / 4 + 6 / 3 - 5)^2
    ("ipo", {"normalize": "sum"}, pair(4.0, -6.0, num_tokens=(4, 3)), 25.0),  # (10 - 5)^2
    ("dpo_norm", {}, pair(4.0, 6.0, num_tokens=(4, 10)), 0.126928),  # 5 (1 - .6) = 2: -LS(2)
    ("discopop", {}, pair(-1.0, 0.0), 0.807966),  # g = S(-1): .731059 * .718460 + g e^.05
    ("discopop", {}, pair(1.0, 0.0), 0.875181),  # g = S(1): .268941 * .668460 + g e^-.05
    ("apo_zero", {}, ANCHORED, 0.646482),  # 1 - .622459 + .268941
    ("apo_down", {}, ANCHORED, 0.804885),  # .622459 + 1 - .817574
    ("bco_pair", {}, ANCHORED, 0.787339),  # .474077 + .313262
    ("nca", {}, ANCHORED, 1.117746),  # .474077 + .974077 / 2 + .313262 / 2
    ("sppo", {}, ANCHORED, 25.0),  # (5 - 5)^2 + (-10 + 5)^2
    ("rpo_sq", {"eta": 2}, SCORED, 4.0),  # twice 1.5 is wanted
    # S(3) = .952574: .952574 (-.048587 + .313262) + .047426 (-3.048587 + 1.313262)
    ("rpo_bwd_kl", {"eta": 2}, SCORED, 0.169823),
    # S(1) = .731059: .731059 (-.313262 + .048587) + .268941 (-1.313262 + 3.048587)
    ("rpo_fwd_kl", {"eta": 2}, SCORED, 0.273209),
    ("rpo_bwd_kl", {"eta": 2 / 3}, SCORED, 0.0),
    ("rpo_sq", {}, SCORED, 0.25),  # (1 - 1.5)^2
    # m_c = -.5, m_l = -1: .5 - .1 LS(.432752 + .541325)
    ("orpo", {}, pair(-2.0, -3.0, num_tokens=(4, 3)), 0.532030),
    ("simpo", {}, pair(-4.0, -6.0, num_tokens=(4, 5)), 1.313262),  # 10 (-1 + 1.2) - 3: -LS(-1)
    ("cpo", {}, LIKELY, 2.313262),  # -LS(1) + 4 / 2
    ("cpo", {"alpha": 0.5}, LIKELY, 1.313262),
    ("slic", {}, LIKELY, 0.4),  # past its margin: .1 * 4
    ("slic", {"normalize": "mean"}, LIKELY, 0.2),
    ("slic", {}, pair(-4.0, -4.5), 0.9),  # 1 - .5 + .4
    ("kto", {}, GOOD, 0.462570),  # 1 - S(.1 (2 - .5))
    ("kto", {}, BAD, 0.413382),  # 1 - S(.1 (.5 + 3))
    ("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.5}, BOTH, 0.450273),
    ("kto_zero", {}, GOOD, 0.450166),  # 1 - S(.2)
    ("kto_logsigmoid", {}, GOOD, 0.620957),  # -LS(.15)
    ("apo_zero_unpaired", {}, BOTH, 0.437862),  # (1 - S(.2) + S(-.3)) / 2
    # Margins of the policy: 3 and -2; of the reference: -6 and 1. Sorted: d = -2 + 6 and 3 - 1.
    ("aot", {"beta": 0.5}, RANKED, 0.220095),  # (-LS(2) - LS(1)) / 2
    ("aot", {"beta": 0.5, "label_smoothing": 0.25}, RANKED, 0.595095),  # and (1 + 2) / 2 / 4
    ("reward", {}, completions([1.5, 0.5], roles=PAIR), 0.313262),  # -LS(1)
    ("reward_binary", {}, labelled(("+", 2.0), ("-", -1.0)), 0.220095),  # (-LS(2) - LS(1)) / 2
]


@each(
    {
        f"{name} {values} {found}": (name, values, whole, found)
        for name, values, whole, found in BY_HAND
    }
)
def test_the_loss_of_a_step(name, values, whole, expected):
    assert run(name, whole, **values).loss == pytest.approx(expected, abs=5e-7)


def test_every_method_with_a_loss_of_whole_completions_is_worked_by_hand():
    here = {name for name, *_ in BY_HAND} | {"bco", "aot_unpaired", "sft", "csft"}
    assert here == {name for name, method in METHODS.items() if method.rows != "grouped"}


def test_kto_reports_the_kl_before_and_after_the_clamp_of_its_mean():
    taken = run("kto", labelled(("+", 1.0), ("-", 1.0)), mismatched=(1.0, -4.0))
    told = {name: taken.means[f"kl/{name}"] for name in ("raw", "clamped", "pairs")}
    assert told == {"raw": -1.5, "clamped": 0.0, "pairs": 2.0}
    assert taken.loss == pytest.approx(0.5)  # (1 - S(.1) + 1 - S(-.1)) / 2


def test_orpo_reports_its_parts_and_counts_pairs_or_tokens():
    taken = run("orpo", pair(-2.0, -3.0, num_tokens=(4, 3)))
    assert taken.means["log_odds/ratio"] == pytest.approx(0.974077, abs=5e-7)
    assert taken.means["log_odds/accuracy"] == 1.0
    assert taken.means["rewards/chosen"] == pytest.approx(-0.05)  # lam m_c
    # Chosen: 2 nats over 4 tokens and 2 nats over 1: (.5 + 2) / 2 a pair, 4 / 5 a token.
    whole = paired((-2.0, -3.0), (-2.0, -3.0), num_tokens=[4, 3, 1, 3])
    for scope, nll in (("pair", 1.25), ("global_tokens", 0.8)):
        assert run("orpo", whole, nll_scope=scope).means["nll"] == pytest.approx(nll)


@pytest.mark.parametrize("assignment", [[[0, 1]], [[1], [0]], [[], [1, 0]]])
def test_of_equal_margins_the_earlier_row_of_the_step_ranks_lower(assignment):
    # Margins 2 and 2 against 0 and 1: d = 2 for the first row, 1 for the second.
    whole = paired((-1.0, -3.0), (-2.0, -4.0), reference=[(-2.0, -3.0), (-3.0, -3.0)])
    options = options_of(METHODS["aot"], {"beta": 1})
    taken = take(METHODS["aot"], whole, assignment=assignment, options=options)
    assert taken.losses.tolist() == pytest.approx([0.126928, 0.313262], abs=5e-7)


def test_aot_unpaired_brings_the_halves_of_one_difference_from_two_rows():
    # r_c = 4, -1 and r_l = -3, 1. Sorted: d = -1 + 3 = 2 and 4 - 1 = 3.
    taken = run("aot_unpaired", paired((4.0, -3.0), (-1.0, 1.0)), beta=1)
    # Each row has one completion of either: (ln(1 + e^-2) + ln(1 + e^-3)) / 2.
    assert taken.losses.tolist() == pytest.approx([0.087758, 0.087758], abs=5e-7)
    # Half (of two rows) of S(-3) = .047426 for d = 3, of S(-2) = .119203 for d = 2.
    slopes = [-0.023713, 0.059601, -0.059601, 0.023713]
    assert taken.gradient.tolist() == pytest.approx(slopes, abs=5e-7)


def test_bco_moves_its_zero_point_with_every_step():
    # Rewards .2, .5, -.1: d = .2, so -LS(0), -LS(.3) and -LS(.3) = .554355.
    taken = run("bco", labelled(("+", 2.0), ("+", 5.0), ("-", -1.0)))
    assert taken.losses.tolist() == pytest.approx([0.693147, 0.554355, 0.554355], abs=5e-7)
    assert taken.means["bco/delta"] == pytest.approx(0.2)
    # A fourth reward of -.4: d = (.6 - .4) / 4 = .05, and -LS(-.45) = ln(1 + e^.45).
    second = take(METHODS["bco"], labelled(("+", -4.0)), state=taken.state)
    assert second.loss == pytest.approx(0.943249, abs=5e-7)
    assert second.state["bco"] == pytest.approx((4.0, 0.05))


def test_imitation_divides_by_all_tokens_of_the_step_and_reports_by_completion():
    # 3 nats over 4 tokens and 5 over 1: 8 / 5 a token, (.75 + 5) / 2 a completion.
    taken = run("sft", completions([-3.0, -5.0], num_tokens=[4, 1], roles=[Role.CHOSEN] * 2))
    assert (taken.loss, taken.means["nll"]) == (1.6, 2.875)
    # csft learns bad completions as it does good ones, each behind its own text.
    taken = run("csft", completions([-6.0, -2.0], num_tokens=[4, 1], roles=LABELS))
    assert taken.loss == pytest.approx(8 / 5)
    assert taken.means == pytest.approx({"nll/desirable": 1.5, "nll/undesirable": 2.0})
    texts = control_texts(CsftOptions(good_token="<good>", bad_token="<bad>"))
    assert texts == {Role.DESIRABLE: "<good>", Role.UNDESIRABLE: "<bad>"}


def test_scores_are_compared_with_their_margin_and_with_no_reference():
    whole = completions([1.5, 0.5], [-70.0, -90.0], roles=PAIR, columns={"wanted": [1.0]})
    taken = run("reward", whole, modifiers=IN_USE["margin"])
    assert taken.loss == pytest.approx(math.log(2))  # -LS(1.5 - .5 - 1)
    told = {"chosen": 1.5, "rejected": 0.5, "margins": 1.0, "accuracies": 1.0, "ties": 0.0}
    assert taken.means == {f"rewards/{name}": value for name, value in told.items()}
    taken = run("reward_binary", completions([2.0, -1.0], [-70.0, -90.0], roles=LABELS))
    told = {"chosen": 2.0, "rejected": -1.0, "accuracies": 1.0, "ties": 0.0}
    assert taken.means == {f"rewards/{name}": value for name, value in told.items()}


def test_odds_are_exact_at_both_ends_and_their_slopes_finite():
    x = torch.tensor([-1e-10, -math.log(2), -1.0, -50.0], dtype=torch.float64)
    # 1 - e^x is 1e-10, .5, .632121 and 1 - 1.93e-22
    expected = [math.log(1e-10), -math.log(2), -0.458675, -math.exp(-50)]
    assert log1mexp(x).tolist() == pytest.approx(expected, rel=1e-6)
    near, certain = torch.tensor([[-1e-20], [0.0]], dtype=torch.float64, requires_grad=True)
    near.retain_grad()
    certain.retain_grad()
    log1mexp(near).backward()
    assert near.grad.item() == pytest.approx(-1e20)  # -e^x / (1 - e^x)
    odds = log_odds(certain)
    odds.backward()
    assert odds.item() == pytest.approx(10 * math.log(10))  # p = 1 - 1e-10
    assert certain.grad.isfinite().all()
