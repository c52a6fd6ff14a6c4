import dataclasses
import math

import pytest
import torch

from align.schemas.errors import UsageError
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.table import METHODS, objective_of
from support.method_steps import (
    IN_USE,
    LABELS,
    MODIFIED,
    PAIR,
    Said,
    each,
    random_completions,
    random_rows,
    rows_of,
    take,
    take_objective,
)
from support.refusals import refuses

DPO, WEIGHED = METHODS["dpo"], IN_USE["row_weight"]


def pairs(*rows, columns=None):
    return rows_of(*rows, roles=PAIR, columns=columns)


def ratios(whole, **values):
    """r of each completion as the method is to see it."""
    return Modifiers(**values).applied(whole).ratios.tolist()


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


def test_humanline_of_means_and_of_log_probs_without_a_reference():
    humanline = Modifiers(humanline=True)
    # ipo: (1.5 + .5) / 2 - (-1 + .1) / 2 = 1.45, and (1.45 - 5)^2; half of 2 (1.45 - 5) a token.
    taken = take(METHODS["ipo"], pairs(CLAMPABLE), modifiers=humanline)
    assert taken.loss == pytest.approx(12.6025)
    assert taken.token_gradient.tolist() == pytest.approx([0.0, -3.55, 0.0, 3.55])
    # Without a reference a token's log-prob is clamped: -.5 and -3 as -.5 and -1.
    said = [Said((0.0, 0.0), logps=(-0.5, -3.0)), Said((0.0, 0.0), logps=(-0.2, -0.4))]
    taken = take(METHODS["simpo"], pairs(said), modifiers=humanline)
    # m_c = -.75, m_l = -.3: ln(1 + e^7.5), whose slope is 5 S(7.5) a token.
    assert taken.loss == pytest.approx(7.500553, abs=5e-7)
    assert taken.token_gradient.tolist() == pytest.approx([-4.997237, 0, 4.997237, 4.997237])
    assert taken.means["rewards/margins"] == pytest.approx(-4.5)
    assert taken.means["humanline/unclamped"] == 0.75
    # slic: 1 + 1.5 - .6, and a tenth of the 3.5 nats that are imitated: they are not clamped.
    taken = take(METHODS["slic"], pairs(said), modifiers=humanline)
    assert taken.loss == pytest.approx(2.25)
    assert taken.token_gradient.tolist() == pytest.approx([-1.1, -0.1, 1.0, 1.0])
    assert taken.means["logps/chosen"] == pytest.approx(-3.5)
    for name in ("simpo", "slic"):  # a cache need not keep what no loss reads
        assert objective_of(name, humanline.active).needs == frozenset()


def test_in_a_mixture_each_method_sees_its_own_clamped_numbers():
    how = {"humanline": True, "log_eps_p": -0.4, "log_eps_r": 0.3}
    whole = pairs(*random_rows((2, 2, 2)))
    parts = [take_objective(objective_of(name, how), whole) for name in ("simpo", "dpo")]
    both = take_objective(objective_of("simpo:2+dpo:0.5", how), whole)
    expected = 2 * parts[0].loss + 0.5 * parts[1].loss
    assert both.reported == pytest.approx(expected, rel=1e-12)


def test_mean_ratios_divides_each_completion_by_its_own_length():
    mean = Modifiers(mean_ratios=True)
    # r / n is 1 and -2: .1 * 3 against the 1.5 that the scores ask for.
    whole = pairs([Said((1.0,) * 4, score=2.0), Said((-2.0,) * 3, score=0.5)])
    by_hand = {
        "rpo_sq": 1.44,  # (.3 - 1.5)^2
        # S(1.5) = .817574: .817574 (-.201413 + .554355) + .182426 (-1.701413 + .854355)
        "rpo_bwd_kl": 0.134031,
        # S(.3) = .574443: .574443 (-.554355 + .201413) + .425557 (-.854355 + 1.701413)
        "rpo_fwd_kl": 0.157727,
    }
    for name, expected in by_hand.items():
        taken = take(METHODS[name], whole, modifiers=mean)
        assert taken.loss == pytest.approx(expected, abs=1e-6), name
        assert taken.means["rewards/margins"] == pytest.approx(0.3)
    # And kto's z, which is a mean of what the same division makes of mismatched completions.
    whole = rows_of([Said((1.5,) * 4), Said((-3.0,) * 3)], roles=LABELS)
    assert objective_of("kto", mean.active).ratios(whole).tolist() == pytest.approx([1.5, -3.0])
    taken = take(METHODS["kto"], whole, modifiers=mean, mismatched=(0.5,))
    # 1 - S(.1 (1.5 - .5)) and 1 - S(.1 (.5 + 3))
    assert taken.losses.tolist() == pytest.approx([0.475021, 0.413382], abs=5e-7)


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
    # Clamped tails are weighed as well: 1.5 + .4 (.5 + 1.5) = 2.3 against -1.
    whole = pairs([Said((4.0, 0.5, 2.0)), Said((-7.0,))])
    assert ratios(whole, humanline=True, ld_alpha=0.4) == pytest.approx([2.3, -1.0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # u = 2 and 1/4. reverse: log 2 + log 4.
        ({"f_divergence": "reverse_kl"}, 2.079442),
        ({"f_divergence": "forward_kl"}, 3.5),  # (1 - 1/2) - (1 - 4)
        ({"f_divergence": "js"}, 1.203973),  # log (4/3) - log (2/5)
        # alpha .5: (1/sqrt 2 - 1) / -.5 - (2 - 1) / -.5 = .585786 + 2
        ({"f_divergence": "alpha"}, 2.585786),
        ({"f_divergence": "alpha", "f_alpha": 2.0}, 1.75),  # (2 - 1) - (1/4 - 1)
        ({"f_divergence": "alpha", "f_alpha": 0.0}, 3.5),  # alpha 0 is forward_kl
        ({"f_divergence": "alpha", "f_alpha": 1.0}, 2.079442),  # alpha 1 is reverse_kl
        ({"f_divergence": "alpha", "f_alpha": 1 + 1e-9}, 2.079442),
    ],
)
def test_divergences_of_twice_and_a_quarter_as_likely(values, expected):
    up, down = math.log(2), math.log(0.25)
    whole = pairs([Said((up,)), Said((down,))])
    chosen, rejected = ratios(whole, **values)
    assert chosen - rejected == pytest.approx(expected, abs=5e-7)
    taken = take(DPO, whole, modifiers=Modifiers(**values))
    assert taken.loss == pytest.approx(math.log1p(math.exp(-0.1 * expected)), abs=5e-8)
    assert taken.means["rewards/margins"] == pytest.approx(0.1 * expected, abs=5e-8)


def test_a_divergence_tells_completions_apart_that_are_thirty_nats_less_likely():
    # (1 - e^30) - (1 - e^31)
    whole = pairs([Said((-30.0,)), Said((-31.0,))])
    chosen, rejected = ratios(whole, f_divergence="forward_kl")
    assert chosen - rejected == pytest.approx(math.exp(31) - math.exp(30))


def test_wpo_weighs_pairs_by_how_likely_the_policy_is_to_write_them():
    # m' is the mean of log p - log sum p^2: chosen (-1 + .5 - 2 + .7) / 2 = -.9, rejected -.3:
    # e^-1.2 = .301194 of -LS(.3) = .554355.
    whole = pairs(
        [
            Said((1.0, 1.0), logps=(-1.0, -2.0), collision_logps=(-0.5, -0.7)),
            Said((-1.0,), logps=(-0.5,), collision_logps=(-0.2,)),
        ]
    )
    taken = take(DPO, whole, modifiers=Modifiers(wpo=True))
    assert taken.loss == pytest.approx(0.166969, abs=5e-7)
    # No gradient through the weight: the slope is that of dpo times the weight.
    slope = math.exp(-1.2) * 0.1 / (1 + math.exp(0.3))
    assert taken.token_gradient.tolist() == pytest.approx([-slope, -slope, slope])
    # Above 1 if likelier than what the policy draws: log p - log p^2 = log 2 on either side.
    surest = Said((0.0,), logps=(math.log(0.5),), collision_logps=(math.log(0.25),))
    taken = take(DPO, pairs([surest, surest]), modifiers=Modifiers(wpo=True))
    assert taken.loss == pytest.approx(4 * math.log(2))


def test_columns_of_the_data_ask_for_a_margin_and_weigh_rows():
    # x = .1 * 4 - 1.4 = -1: ln(1 + e); hinge: 1 - x = 2.
    whole = pairs([Said((2.0,)), Said((-2.0,))], columns={"wanted": [1.4]})
    wanted = Modifiers(margin="wanted")
    assert wanted.columns == ("wanted",)
    assert take(DPO, whole, modifiers=wanted).loss == pytest.approx(1.313262)
    assert take(METHODS["hinge"], whole, modifiers=wanted).loss == pytest.approx(2.0)
    # Losses ln 2 and ln(1 + e^-.4) = .513015, weighed 2 and .5, over two rows.
    still, told = [Said((0.0,))] * 2, [Said((2.0,)), Said((-2.0,))]
    taken = take(DPO, pairs(still, told, columns={"weight": [2.0, 0.5]}), modifiers=WEIGHED)
    assert taken.losses.tolist() == pytest.approx([1.386294, 0.256508], abs=5e-7)
    assert taken.loss == pytest.approx(0.821401, abs=5e-7)
    # A weight holds for each completion or candidate of its row.
    whole = rows_of(still, still, roles=LABELS, columns={"weight": [2.0, 0.5]})
    taken = take(METHODS["kto"], whole, modifiers=WEIGHED, mismatched=(0.0,))
    assert taken.losses.tolist() == pytest.approx([1.0, 1.0, 0.25, 0.25])
    whole = rows_of(*random_rows((3, 1, 2)), columns={"weight": [2.0, 0.5, 3.0]})
    plain, weighed = (take(METHODS["grpo"], whole, modifiers=one) for one in (None, WEIGHED))
    expected = plain.losses * torch.tensor([2.0, 2.0, 2.0, 0.5, 3.0, 3.0])
    torch.testing.assert_close(weighed.losses, expected, rtol=1e-12, atol=1e-12)


@each(MODIFIED)
def test_a_modifier_a_method_takes_reaches_its_loss_and_no_likelihood(objective):
    whole = random_completions(objective.rows, 8)
    plain, changed = (
        take_objective(
            dataclasses.replace(objective, modifiers=modifiers), whole, mismatched=(0.3,)
        )
        for modifiers in (Modifiers(), objective.modifiers)
    )
    assert not torch.allclose(plain.losses, changed.losses)
    for metric in ("nll", "logps/chosen", "rewards/scores"):
        assert plain.means.get(metric) == changed.means.get(metric)


def test_a_modifier_a_method_does_not_take_is_refused_with_those_that_do():
    for method in METHODS.values():
        for name in IN_USE.keys() - method.modifiers:
            able = ", ".join(each for each in METHODS if name in METHODS[each].modifiers)
            with refuses(UsageError, f"method.{name} ", method.name, f" {able}."):
                objective_of(method.name, IN_USE[name].active)
