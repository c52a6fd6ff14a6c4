"""Losses worked out by hand."""

import math

import pytest
import torch

from align.schemas.rows import Role
from align.stages.methods.kto import zero_point
from align.stages.methods.reference_free import log1mexp, log_odds
from align.stages.methods.sft import CsftOptions, control_texts
from align.stages.methods.table import METHODS, options_of, recipe_of
from support.method_steps import (
    IN_USE,
    LABELS,
    PAIR,
    branches,
    each,
    pair,
    step_of,
    take,
    take_recipe,
)

pytestmark = pytest.mark.numeric


def loss(name, whole, *, mismatched=(), **values):
    """The loss of a step, to six digits."""
    method = METHODS[name]
    taken = take(method, whole, mismatched=mismatched, options=options_of(method, values))
    return pytest.approx(taken.loss, abs=5e-7)


def labelled(*pairs):
    """Branches of (label, log-ratio)."""
    roles = {"+": Role.DESIRABLE, "-": Role.UNDESIRABLE}
    return branches([ratio for _, ratio in pairs], roles=[roles[label] for label, _ in pairs])


def paired(*rows, reference=(), num_tokens=None):
    """Rows of the log-probs of a chosen and a rejected branch, and of the reference's."""
    flat = [[logp for row in some for logp in row] for some in (rows, reference)]
    return branches(*flat, num_tokens=num_tokens, roles=PAIR * len(rows))


UNMOVED = {
    "dpo": math.log(2),  # -LS(0)
    "cdpo": math.log(2),  # .8 ln 2 + .2 ln 2
    "robust": math.log(2),  # (.9 - .1) ln 2 / .8
    "exo": 2.761231,  # .5 (ln .5 - ln .999) + .5 (ln .5 - ln .001) = -ln 2 + .0005003 + 3.453878
    "hinge": 1.0,  # 1 - 0
    "discopop": 0.846574,  # g = .5: .5 ln 2 + .5 exp(0)
    "ipo": 25.0,  # (0 - 1 / .2)^2
    "dpo_norm": math.log(2),
    "nca": 2 * math.log(2),  # (1 + .5 + .5) ln 2
    "bco_pair": 2 * math.log(2),
    "sppo": 50.0,  # (-5)^2 + 5^2
    "apo_zero": 1.0,  # 1 - .5 + .5
    "apo_down": 1.0,  # .5 + 1 - .5
    "kto": 0.5,
    "kto_zero": 0.5,
    "kto_logsigmoid": math.log(2),
    "apo_zero_unpaired": 0.5,
    "aot": math.log(2),
    "aot_unpaired": math.log(2),
    "bco": math.log(2),  # all rewards are 0, and so is their mean
    "rpo_sq": 1.0,  # (0 - 1)^2: the scores differ by 1
    "rpo_bwd_kl": 0.110944,  # p = S(1) = .731059: ln 2 + p ln p + (1 - p) ln(1 - p)
    "rpo_fwd_kl": 0.120115,  # -ln 2 - .5 (LS(1) + LS(-1)) = -.693147 + .5 (.313262 + 1.313262)
}


@each(
    {
        name: (name,)
        for name, own in METHODS.items()
        if "reference" in own.needs and own.rows != "grouped"  # there it hangs on the group
    }
)
def test_the_loss_of_an_unmoved_policy(name):
    if METHODS[name].rows == "paired":
        whole = pair(-12.0, -30.0, (-12.0, -30.0), num_tokens=(4, 9), scores=(1.5, 0.5))
    else:
        whole = labelled(("+", 0.0), ("-", 0.0))
    assert loss(name, whole, mismatched=(0.0,)) == UNMOVED[name]


def test_dpo_of_a_margin_of_ten():
    # r_c = 4, r_l = -6: -LS(.1 * 10) = ln(1 + e^-1); with e = .2 a fifth of -LS(-1) = that + 1.
    whole = pair(-8.0, -36.0, reference=(-12.0, -30.0))
    assert loss("dpo", whole) == 0.313262
    assert loss("dpo", whole, label_smoothing=0.2) == 0.513262
    assert loss("cdpo", whole) == 0.513262
    assert loss("robust", whole) == 0.188262  # (.9 * .313262 - .1 * 1.313262) / .8


def test_the_likelihood_of_chosen_branches_may_be_added():
    # ln(1 + e^-1) and half of 8 nats over 4 tokens
    whole = pair(-8.0, -36.0, reference=(-12.0, -30.0), num_tokens=(4.0, 9.0))
    assert loss("dpo", whole, sft_weight=0.5) == 1.313262
    assert take(METHODS["dpo"], whole).means["nll"] == 2.0


def test_hinge_stops_where_the_margin_is_reached():
    assert loss("hinge", pair(4.0, -2.0)) == 0.4  # 1 - .1 * 6
    assert loss("hinge", pair(6.0, -6.0)) == 0.0


def test_ipo_compares_per_token_or_whole_branches():
    # r_c / n_c = 4 / 4, r_l / n_l = -6 / 3: (1 + 2 - 5)^2; in sums (10 - 5)^2.
    whole = pair(4.0, -6.0, num_tokens=(4.0, 3.0))
    assert loss("ipo", whole) == 4.0
    assert loss("ipo", whole, normalize="sum") == 25.0


def test_dpo_norm_divides_each_side_by_its_own_length():
    # 5 (4 / 4 - 6 / 10) = 2: ln(1 + e^-2)
    assert loss("dpo_norm", pair(4.0, 6.0, num_tokens=(4.0, 10.0))) == 0.126928


def test_anchored_losses_of_a_pair():
    # b r_c = .5, b r_l = -1: S(.5) = .622459, S(-1) = .268941, S(1.5) = .817574
    whole = pair(5.0, -10.0)
    assert loss("apo_zero", whole) == 0.646482  # 1 - .622459 + .268941
    assert loss("apo_down", whole) == 0.804885  # .622459 + 1 - .817574
    assert loss("bco_pair", whole) == 0.787339  # .474077 + .313262
    assert loss("nca", whole) == 1.117746  # .474077 + .974077 / 2 + .313262 / 2
    assert loss("sppo", whole) == 25.0  # (5 - 5)^2 + (-10 + 5)^2


def test_kto_of_branches_of_either_label():
    # z = .5: desirable 1 - S(.1 (2 - .5)), undesirable 1 - S(.1 (.5 + 3))
    assert loss("kto", labelled(("+", 2.0), ("+", 2.0)), mismatched=(0.25, 0.75)) == 0.462570
    assert loss("kto", labelled(("-", -3.0), ("-", -3.0)), mismatched=(0.25, 0.75)) == 0.413382
    both = labelled(("+", 2.0), ("-", -3.0))
    assert loss("kto", both, mismatched=(0.5,)) == 0.437976  # a mean over both branches
    weighted = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    assert loss("kto", both, mismatched=(0.5,), **weighted) == 0.450273  # .693855 + .206691
    assert loss("kto_zero", labelled(("+", 2.0), ("+", 2.0))) == 0.450166  # 1 - S(.2)
    assert loss("kto_logsigmoid", labelled(("+", 2.0), ("+", 2.0)), mismatched=(0.5,)) == 0.620957


def test_the_zero_point_is_clamped_after_the_mean_and_carries_no_gradient():
    step = step_of(labelled(("+", 0.0)), mismatched=(3.0, -5.0))
    assert zero_point(step).item() == 0.0  # not (3 + 0) / 2
    step.mismatched.requires_grad_()
    assert not zero_point(step).requires_grad


def test_kto_reports_the_kl_before_and_after_the_clamp():
    taken = take(METHODS["kto"], labelled(("+", 1.0), ("-", 1.0)), mismatched=(1.0, -4.0))
    told = {name: taken.means[name] for name in ("kl/raw", "kl/clamped", "kl/pairs")}
    assert told == {"kl/raw": -1.5, "kl/clamped": 0.0, "kl/pairs": 2.0}


def test_orpo_of_a_pair():
    # m_c = -.5, m_l = -1: lo_c = -.5 - ln(1 - e^-.5) = .432752, lo_l = -.541325,
    # -LS(.974077) = .320300, nll = .5
    whole = pair(-2.0, -3.0, num_tokens=(4.0, 3.0))
    assert loss("orpo", whole) == 0.532030
    taken = take(METHODS["orpo"], whole)
    assert taken.means["log_odds/ratio"] == pytest.approx(0.974077, abs=5e-7)
    assert taken.means["log_odds/accuracy"] == 1.0
    assert taken.means["nll"] == 0.5
    assert taken.means["rewards/chosen"] == pytest.approx(-0.05)  # lam m_c


def test_the_likelihood_of_orpo_counts_pairs_or_tokens():
    # Chosen: 2 nats over 4 tokens and 2 nats over 1: (.5 + 2) / 2 a pair, 4 / 5 a token.
    whole = paired((-2.0, -3.0), (-2.0, -3.0), num_tokens=[4, 3, 1, 3])
    for scope, nll in (("pair", 1.25), ("global_tokens", 0.8)):
        options = options_of(METHODS["orpo"], {"nll_scope": scope})
        assert take(METHODS["orpo"], whole, options=options).means["nll"] == pytest.approx(nll)


def test_simpo_of_a_pair():
    # b (m_c - m_l) - b gamma_ratio = 2.5 * .2 - 1.4
    whole = pair(-4.0, -6.0, num_tokens=(4.0, 5.0))
    assert loss("simpo", whole, beta=2.5, gamma_ratio=0.56) == 1.241154


def test_cpo_and_slic_of_a_pair():
    # lp_c - lp_l = 10: ln(1 + e^-1) + nll, and slic is past its margin: .1 * 4 or .1 * 4 / 2
    whole = pair(-4.0, -14.0, num_tokens=(2.0, 5.0))
    assert loss("cpo", whole) == 2.313262
    assert loss("cpo", whole, alpha=0.5) == 1.313262
    assert loss("slic", whole) == 0.4
    assert loss("slic", whole, normalize="mean") == 0.2
    assert loss("slic", pair(-4.0, -4.5)) == 0.9  # 1 - .5 + .4


def test_discopop_of_a_negative_and_a_positive_margin():
    # x = -.05: g = S(-1) = .268941, -LS(x) = .718460, e^.05 = 1.051271
    assert loss("discopop", pair(-1.0, 0.0)) == 0.807966
    # x = .05: g = S(1) = .731059, -LS(x) = .668460, e^-.05 = .951229
    assert loss("discopop", pair(1.0, 0.0)) == 0.875181


def test_aot_compares_margins_of_the_same_rank():
    # Margins of the policy: 3 and -2; of the reference: -6 and 1. Sorted: d = -2 + 6 and 3 - 1.
    whole = paired((-1.0, -4.0), (-5.0, -3.0), reference=[(-9.0, -3.0), (-2.0, -3.0)])
    taken = take(METHODS["aot"], whole, options=options_of(METHODS["aot"], {"beta": 0.5}))
    # The first row has the larger margin: -LS(.5 * 2), then -LS(.5 * 4).
    assert taken.losses.tolist() == pytest.approx([0.313262, 0.126928], abs=5e-7)
    assert loss("aot", whole, beta=0.5) == 0.220095
    # With e = .25 a quarter of -LS(-x) = -LS(x) + x is added: x / 4 of 1 and of 2.
    assert loss("aot", whole, beta=0.5, label_smoothing=0.25) == 0.595095


@pytest.mark.parametrize("assignment", [[[0, 1]], [[1], [0]], [[], [1, 0]]])
def test_of_equal_margins_the_earlier_row_of_the_step_ranks_lower(assignment):
    # Margins 2 and 2 against 0 and 1: d = 2 for the first row, 1 for the second.
    whole = paired((-1.0, -3.0), (-2.0, -4.0), reference=[(-2.0, -3.0), (-3.0, -3.0)])
    taken = take(
        METHODS["aot"],
        whole,
        assignment=assignment,
        options=options_of(METHODS["aot"], {"beta": 1}),
    )
    assert taken.losses.tolist() == pytest.approx([0.126928, 0.313262], abs=5e-7)


def test_aot_unpaired_brings_the_halves_of_one_difference_from_two_rows():
    # r_c = 4, -1 and r_l = -3, 1. Sorted: d = -1 + 3 = 2 and 4 - 1 = 3.
    whole = paired((4.0, -3.0), (-1.0, 1.0))
    options = options_of(METHODS["aot_unpaired"], {"beta": 1})
    taken = take(METHODS["aot_unpaired"], whole, options=options)
    # Each row has one branch of either: (ln(1 + e^-2) + ln(1 + e^-3)) / 2.
    assert taken.losses.tolist() == pytest.approx([0.087758, 0.087758], abs=5e-7)
    assert taken.loss == pytest.approx(0.087758, abs=5e-7)
    # Half (of two rows) of S(-3) = .047426 for d = 3, of S(-2) = .119203 for d = 2.
    slopes = [-0.023713, 0.059601, -0.059601, 0.023713]
    assert taken.gradient.tolist() == pytest.approx(slopes, abs=5e-7)


def test_bco_moves_its_zero_point_with_every_step():
    # Rewards .2, .5, -.1: d = .2, so -LS(0), -LS(.3) and -LS(.3) = .554355.
    first = labelled(("+", 2.0), ("+", 5.0), ("-", -1.0))
    taken = take(METHODS["bco"], first)
    assert taken.losses.tolist() == pytest.approx([0.693147, 0.554355, 0.554355], abs=5e-7)
    assert taken.means["bco/delta"] == pytest.approx(0.2)
    assert taken.state["bco"] == pytest.approx((3.0, 0.2))
    # A fourth reward of -.4: d = (.6 - .4) / 4 = .05, and -LS(-.45) = ln(1 + e^.45).
    second = take(METHODS["bco"], labelled(("+", -4.0)), state=taken.state)
    assert second.loss == pytest.approx(0.943249, abs=5e-7)
    assert second.state["bco"] == pytest.approx((4.0, 0.05))


def test_bco_without_a_step_behind_it_compares_to_zero():
    whole = labelled(("+", 2.0), ("-", -3.0))
    output = METHODS["bco"].loss(whole, step_of(whole), METHODS["bco"].options())
    # -LS(.2) and -LS(.3)
    assert output.losses.tolist() == pytest.approx([0.598139, 0.554355], abs=5e-7)
    assert output.metrics["bco/delta"].tolist() == [0.0, 0.0]


def test_bco_remembers_nothing_of_a_step_without_branches():
    none = {"rewards": torch.empty(0, dtype=torch.float64)}
    for before, after in (((), (0.0, 0.0)), ((4.0, 0.05), (4.0, 0.05))):
        assert METHODS["bco"].update_state(before, none) == after


def test_reward_aware_losses_of_a_margin_and_two_scores():
    # b D = .1 * 10 = 1; the scores differ by 1.5, twice that is wanted.
    whole = pair(4.0, -6.0, scores=(2.0, 0.5))
    assert loss("rpo_sq", whole, eta=2) == 4.0
    # S(3) = .952574: .952574 (-.048587 + .313262) + .047426 (-3.048587 + 1.313262)
    assert loss("rpo_bwd_kl", whole, eta=2) == 0.169823
    # S(1) = .731059: .731059 (-.313262 + .048587) + .268941 (-1.313262 + 3.048587)
    assert loss("rpo_fwd_kl", whole, eta=2) == 0.273209
    assert loss("rpo_sq", whole, eta=2 / 3) == 0.0
    assert loss("rpo_bwd_kl", whole, eta=2 / 3) == 0.0
    assert loss("rpo_fwd_kl", whole, eta=2 / 3) == 0.0


def test_sft_divides_by_all_good_tokens_of_the_step():
    # Chosen: 3 nats over 4 tokens and 5 over 1: 8 / 5 a token, (.75 + 5) / 2 a branch.
    whole = branches([-3.0, -5.0], num_tokens=[4, 1], roles=[Role.CHOSEN] * 2, per_row=1)
    taken = take(METHODS["sft"], whole)
    assert (taken.loss, taken.means["nll"]) == (1.6, 2.875)
    assert taken.gradient.tolist() == [-0.2, -0.2]


def test_sft_in_a_mixture_leaves_rejected_branches_alone():
    whole = paired((-3.0, -7.0), (-5.0, -1.0), num_tokens=[4, 9, 1, 2])
    taken = take_recipe(recipe_of("orpo:0.5+sft:2", {}), whole)
    alone = take(METHODS["orpo"], whole)
    assert taken.loss == pytest.approx(0.5 * alone.loss + 2 * 1.6)
    # By 2 / 5 less for each chosen branch, and by nothing for rejected ones.
    assert (taken.gradient - alone.gradient / 2).tolist() == pytest.approx([-0.4, 0, -0.4, 0])


def test_csft_learns_bad_completions_as_it_does_good_ones():
    taken = take(METHODS["csft"], branches([-6.0, -2.0], num_tokens=[4, 1], roles=LABELS))
    assert taken.losses.tolist() == [6.0, 2.0]
    assert taken.loss == pytest.approx(8 / 5)  # over all five tokens
    assert taken.gradient.tolist() == pytest.approx([-1 / 5, -1 / 5])
    assert taken.means == pytest.approx({"nll/desirable": 1.5, "nll/undesirable": 2.0})


def test_each_label_of_csft_has_its_text():
    texts = control_texts(CsftOptions(good_token="<good>", bad_token="<bad>"))
    assert texts == {Role.DESIRABLE: "<good>", Role.UNDESIRABLE: "<bad>"}


def test_a_reward_model_is_asked_for_a_difference_or_for_a_sign():
    # -LS(1.5 - .5), and with a margin of 1 -LS(0)
    whole = branches([1.5, 0.5], roles=PAIR, columns={"wanted": [1.0]})
    assert loss("reward", whole) == 0.313262
    with_margin = take(METHODS["reward"], whole, modifiers=IN_USE["margin"])
    assert with_margin.loss == pytest.approx(math.log(2))
    told = {"chosen": 1.5, "rejected": 0.5, "margins": 1.0, "accuracies": 1.0, "ties": 0.0}
    assert with_margin.means == {f"rewards/{name}": value for name, value in told.items()}
    # (-LS(2) - LS(1)) / 2
    assert loss("reward_binary", labelled(("+", 2.0), ("-", -1.0))) == 0.220095


def test_scores_are_compared_to_no_reference():
    whole = branches([2.0, -1.0], [-70.0, -90.0], roles=LABELS)
    taken = take(METHODS["reward_binary"], whole)
    assert taken.loss == pytest.approx(0.220095, abs=5e-7)
    told = {"chosen": 2.0, "rejected": -1.0, "accuracies": 1.0, "ties": 0.0}
    assert taken.means == {f"rewards/{name}": value for name, value in told.items()}


def test_log1mexp_at_both_ends_and_where_its_two_forms_meet():
    x = torch.tensor([-1e-10, -math.log(2), -1.0, -50.0], dtype=torch.float64)
    # 1 - e^x is 1e-10, .5, .632121 and 1 - 1.93e-22
    expected = [math.log(1e-10), -math.log(2), -0.458675, -math.exp(-50)]
    assert log1mexp(x).tolist() == pytest.approx(expected, rel=1e-6)


def test_the_slope_of_log1mexp_is_finite_where_exp_rounds_to_one():
    x = torch.tensor([-1e-20], dtype=torch.float64, requires_grad=True)
    log1mexp(x).backward()
    assert x.grad.item() == pytest.approx(-1e20)  # -e^x / (1 - e^x)


def test_log_odds_of_a_certain_branch_are_large_but_finite():
    certain = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    odds = log_odds(certain)
    odds.backward()
    assert odds.item() == pytest.approx(10 * math.log(10))  # p = 1 - 1e-10
    assert certain.grad.isfinite().all()
