import dataclasses
import math

import numpy as np
import pytest
import torch

from align.schemas.errors import UsageError
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.table import METHODS, recipe_of
from support.method_steps import (
    IN_USE,
    LABELS,
    MODIFIED,
    PAIR,
    Said,
    each,
    random_branches,
    random_rows,
    rows_of,
    take,
    take_recipe,
)

DPO, KTO, HINGE = (METHODS[name] for name in ("dpo", "kto", "hinge"))


def pairs(*rows, columns=None):
    return rows_of(*rows, roles=PAIR, columns=columns)


def ratios(whole, **values):
    """r of each branch as the method is to see it."""
    return Modifiers(**values).applied(whole).ratios.tolist()


def margin(whole, **values):
    chosen, rejected = ratios(whole, **values)
    return chosen - rejected


# Token by token: chosen 3 and .5, rejected -2 and .1.
CLAMPABLE = [Said((3.0, 0.5)), Said((-2.0, 0.1))]


def test_humanline_clamps_tokens_before_they_are_summed():
    # 1.5 + .5 and -1 + .1: D = 2.9, -LS(.29) = .558623; two of four tokens were inside.
    taken = take(DPO, pairs(CLAMPABLE), modifiers=Modifiers(humanline=True))
    assert taken.loss == pytest.approx(0.558623, abs=5e-7)
    assert taken.means["humanline/unclamped"] == 0.5
    # A clamped token is no longer moved: b S(-.29) = .042800 for the others.
    expected = [0.0, -0.0428, 0.0, 0.0428]
    assert taken.token_gradient.tolist() == pytest.approx(expected, abs=5e-7)
    # Rewards are of the clamped ratios, as the loss is.
    assert taken.means["rewards/margins"] == pytest.approx(0.29)


def test_humanline_reaches_labelled_branches():
    # b r of 2 and -.9: (1 - S(.2) + S(-.09)) / 2 = (.450166 + .477515) / 2
    taken = take(
        METHODS["kto"],
        rows_of(CLAMPABLE, roles=LABELS),
        modifiers=Modifiers(humanline=True),
        mismatched=(0.0,),
    )
    assert taken.loss == pytest.approx(0.463841, abs=5e-7)


def test_ld_alpha_weighs_the_tokens_the_shorter_side_does_not_have():
    # The rejected one has one token: chosen 1 + .4 (.5 + 2) = 2, rejected -1.
    whole = pairs([Said((1.0, 0.5, 2.0)), Said((-1.0,))])
    assert ratios(whole, ld_alpha=0.4) == pytest.approx([2.0, -1.0])
    assert ratios(whole, ld_alpha=0.0) == pytest.approx([1.0, -1.0])
    # And the other way round, in a row of its own.
    both = pairs([Said((1.0, 0.5, 2.0)), Said((-1.0,))], [Said((3.0,)), Said((1.0, 1.0))])
    assert ratios(both, ld_alpha=0.4) == pytest.approx([2.0, -1.0, 3.0, 1.4])
    taken = take(DPO, whole, modifiers=Modifiers(ld_alpha=0.4))
    assert taken.loss == pytest.approx(0.554355, abs=5e-7)  # -LS(.3)
    slope = 0.1 / (1 + math.exp(0.3))
    gradient = [-slope, -0.4 * slope, -0.4 * slope, slope]
    assert taken.token_gradient.tolist() == pytest.approx(gradient)


def test_ld_alpha_leaves_likelihoods_as_they_are_and_weighs_rewards():
    whole = pairs([Said((1.0, 0.5, 2.0)), Said((-1.0,))])
    plain, weighed = (
        take(DPO, whole, modifiers=Modifiers(ld_alpha=alpha)).means for alpha in (1.0, 0.4)
    )
    assert plain["nll"] == weighed["nll"] == 2.0
    assert plain["logps/chosen"] == weighed["logps/chosen"]
    assert plain["rewards/chosen"] == pytest.approx(0.35)  # .1 * 3.5
    assert weighed["rewards/chosen"] == pytest.approx(0.2)  # .1 (1 + .4 * 2.5)


def test_clamped_tails_are_weighed_as_well():
    # Clamped to 1.5, .5, 1.5 and -1: 1.5 + .4 (.5 + 1.5) = 2.3 against -1.
    whole = pairs([Said((4.0, 0.5, 2.0)), Said((-7.0,))])
    assert ratios(whole, humanline=True, ld_alpha=0.4) == pytest.approx([2.3, -1.0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # u = 2 and 1/2. reverse: log 2 + log 2.
        ({"f_divergence": "reverse_kl"}, 1.386294),
        ({"f_divergence": "forward_kl"}, 1.5),  # (1 - 1/2) - (1 - 2)
        ({"f_divergence": "js"}, 0.693147),  # log (4/3) - log (2/3)
        # alpha .5: (1/sqrt 2 - 1) / -.5 - (sqrt 2 - 1) / -.5 = .585786 + .828427
        ({"f_divergence": "alpha"}, 1.414214),
        ({"f_divergence": "alpha", "f_alpha": 2.0}, 1.5),  # (2 - 1) - (1/2 - 1)
        ({"f_divergence": "alpha", "f_alpha": 0.0}, 1.5),  # alpha 0 is forward_kl
    ],
)
def test_divergences_of_twice_and_half_as_likely(values, expected):
    up, down = math.log(2), math.log(0.5)
    whole = pairs([Said((up,)), Said((down,))])
    assert margin(whole, **values) == pytest.approx(expected, abs=5e-7)
    taken = take(DPO, whole, modifiers=Modifiers(**values))
    assert taken.loss == pytest.approx(math.log1p(math.exp(-0.1 * expected)), abs=5e-8)
    assert taken.means["rewards/margins"] == pytest.approx(0.1 * expected, abs=5e-8)


def test_the_alpha_divergence_goes_over_into_the_reverse_one():
    whole = pairs(*random_rows((2,), seed=1))
    reverse = margin(whole)
    assert margin(whole, f_divergence="alpha", f_alpha=1.0) == pytest.approx(reverse, rel=1e-14)
    for near in (1 - 1e-9, 1 + 1e-9):
        found = margin(whole, f_divergence="alpha", f_alpha=near)
        assert found == pytest.approx(reverse, rel=1e-7)


F = {  # f'(u), https://arxiv.org/abs/2309.16240 table 1, less what is the same everywhere
    "forward_kl": lambda u, _: -1 / u,
    "js": lambda u, _: np.log(2 * u / (1 + u)),
    "alpha": lambda u, alpha: (u ** (alpha - 1) - 1) / (alpha - 1),
}


@each({f"{name} {alpha}": (name, alpha) for name in F for alpha in (0.3, 1.7)})
def test_a_divergence_is_its_formula(divergence, alpha):
    rows = random_rows((2,) * 30, seed=4)
    taken = take(DPO, pairs(*rows), modifiers=Modifiers(f_divergence=divergence, f_alpha=alpha))
    for (chosen, rejected), loss in zip(rows, taken.losses.tolist(), strict=True):
        up, down = (F[divergence](np.exp(sum(one.ratios)), alpha) for one in (chosen, rejected))
        assert loss == pytest.approx(np.log1p(np.exp(-0.1 * (up - down))), rel=1e-9)


def test_ld_alpha_is_its_formula():
    rows = random_rows((2,) * 30, seed=6)
    taken = take(DPO, pairs(*rows), modifiers=Modifiers(ld_alpha=0.3))
    for row, loss in zip(rows, taken.losses.tolist(), strict=True):
        shared = min(len(said.ratios) for said in row)
        sums = [
            sum(ratio if t < shared else 0.3 * ratio for t, ratio in enumerate(said.ratios))
            for said in row
        ]
        assert loss == pytest.approx(np.log1p(np.exp(-0.1 * (sums[0] - sums[1]))), rel=1e-10)


def test_wpo_weighs_pairs_by_how_likely_the_policy_is_to_write_them():
    # m' is the mean of log p - log sum p^2: chosen (-1 + .5 - 2 + .7) / 2 = -.9, rejected -.3:
    # e^-1.2 = .301194 of -LS(.3) = .554355.
    whole = pairs(
        [
            Said((1.0, 1.0), logps=(-1.0, -2.0), purity=(-0.5, -0.7)),
            Said((-1.0,), logps=(-0.5,), purity=(-0.2,)),
        ]
    )
    taken = take(DPO, whole, modifiers=Modifiers(wpo=True))
    assert taken.loss == pytest.approx(0.166969, abs=5e-7)
    # No gradient through the weight: the slope is that of dpo times the weight.
    slope = math.exp(-1.2) * 0.1 / (1 + math.exp(0.3))
    assert taken.token_gradient.tolist() == pytest.approx([-slope, -slope, slope])


def test_a_pair_likelier_than_what_the_policy_draws_weighs_more_than_one():
    # p = .5 and nothing else above zero: log p - log p^2 = log 2 on either side.
    surest = Said((0.0,), logps=(math.log(0.5),), purity=(math.log(0.25),))
    taken = take(DPO, pairs([surest, surest]), modifiers=Modifiers(wpo=True))
    assert taken.loss == pytest.approx(4 * math.log(2))


def test_a_margin_is_taken_off_inside_the_sigmoid():
    # x = .1 * 4 - 1.4 = -1: ln(1 + e); hinge: 1 - x = 2.
    whole = pairs([Said((2.0,)), Said((-2.0,))], columns={"wanted": [1.4]})
    assert take(DPO, whole, modifiers=Modifiers(margin="wanted")).loss == pytest.approx(1.313262)
    assert take(HINGE, whole, modifiers=Modifiers(margin="wanted")).loss == pytest.approx(2.0)


def test_a_row_weighs_what_the_data_says():
    # Losses ln 2 and ln(1 + e^-.4) = .513015, weighed 2 and .5, over two rows.
    still, told = [Said((0.0,))] * 2, [Said((2.0,)), Said((-2.0,))]
    columns = {"weight": [2.0, 0.5]}
    taken = take(DPO, pairs(still, told, columns=columns), modifiers=Modifiers(row_weight="weight"))
    assert taken.losses.tolist() == pytest.approx([1.386294, 0.256508], abs=5e-7)
    assert taken.loss == pytest.approx(0.821401, abs=5e-7)


def test_a_row_weight_holds_for_each_branch_or_candidate_of_the_row():
    rows = [[Said((0.0,))] * 2, [Said((0.0,))] * 2]
    whole = rows_of(*rows, roles=LABELS, columns={"weight": [2.0, 0.5]})
    taken = take(KTO, whole, modifiers=IN_USE["row_weight"], mismatched=(0.0,))
    assert taken.losses.tolist() == pytest.approx([1.0, 1.0, 0.25, 0.25])
    whole = rows_of(*random_rows((3, 1, 2)), columns={"weight": [2.0, 0.5, 3.0]})
    plain, weighed = (
        take(METHODS["grpo"], whole, modifiers=one) for one in (None, IN_USE["row_weight"])
    )
    expected = plain.losses * torch.tensor([2.0, 2.0, 2.0, 0.5, 3.0, 3.0])
    torch.testing.assert_close(weighed.losses, expected, rtol=1e-12, atol=1e-12)


def test_every_modifier_is_some_methods():
    assert set().union(*(method.modifiers for method in METHODS.values())) == IN_USE.keys()


@each(MODIFIED)
def test_a_modifier_a_method_takes_reaches_its_loss_and_no_likelihood(recipe):
    whole = random_branches(recipe.rows, 8)
    plain, changed = (
        take_recipe(dataclasses.replace(recipe, modifiers=modifiers), whole, mismatched=(0.3,))
        for modifiers in (Modifiers(), recipe.modifiers)
    )
    assert not torch.allclose(plain.losses, changed.losses)
    for metric in ("nll", "logps/chosen", "rewards/scores"):
        assert plain.means.get(metric) == changed.means.get(metric)


@each(
    {
        f"{method.name} {name}": (method, name)
        for method in METHODS.values()
        for name in IN_USE.keys() - method.modifiers
    }
)
def test_a_modifier_a_method_does_not_take_is_refused(method, name):
    with pytest.raises(UsageError) as refusal:
        recipe_of(method.name, IN_USE[name].active)
    said = str(refusal.value)
    assert f"method.{name} is not for {method.name}." in said
    able = said.partition("take it: ")[2].rstrip(".").split(", ")
    assert all(name in METHODS[other].modifiers for other in able)


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({}, set()),
        ({"ld_alpha": 0.5}, {"token_reference"}),
        ({"humanline": True}, {"token_reference"}),
        ({"wpo": True}, {"purity"}),
        ({"f_divergence": "js", "margin": "wanted"}, set()),
    ],
)
def test_modifiers_say_what_they_need(values, needs):
    assert recipe_of("dpo", values).needs == {"reference"} | needs
    assert Modifiers(**values).columns == tuple({"wanted"} & set(values.values()))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"f_alpha": 0.3}, "f_alpha has no effect without method.f_divergence=alpha"),
        ({"f_alpha": 0.3, "f_divergence": "js"}, "f_alpha has no effect without method."),
        ({"log_eps_r": 2.0}, "log_eps_r has no effect without method.humanline=true"),
        ({"log_eps_p": -2.0}, "log_eps_p has no effect without method.humanline=true"),
        ({"log_eps_p": 0.0, "humanline": True}, "log_eps_p: expected a number below 0"),
        ({"log_eps_r": 0, "humanline": True}, "log_eps_r: expected a number above 0"),
        ({"ld_alpha": -0.1}, "ld_alpha: expected a number of at least 0"),
        ({"f_divergence": "kl"}, "f_divergence: expected reverse_kl or forward_kl or js or alpha"),
        ({"f_alpha": math.inf, "f_divergence": "alpha"}, "f_alpha is inf"),
        ({"humanlin": True}, "humanlin'"),
    ],
)
def test_what_modifiers_refuse(values, said):
    with pytest.raises(UsageError) as refusal:
        recipe_of("dpo", values)
    assert f"method.{said}" in str(refusal.value)


def test_no_method_has_an_option_named_like_a_modifier():
    names = {field.name for field in dataclasses.fields(Modifiers)}
    for method in METHODS.values():
        assert not names & vars(method.options()).keys()
