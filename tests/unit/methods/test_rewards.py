"""Rewards, margins and accuracies are of what the loss compares, over the whole table."""

import math
from dataclasses import replace

import pytest
import torch

from align.schemas.methods import Mean
from align.schemas.rows import LEAST, Role
from align.stages.methods.objective import Objective, Term
from align.stages.methods.table import METHODS, objective_of, options_of
from support.method_steps import (
    IN_USE,
    MISMATCHED,
    PAIR,
    WORDS,
    completions,
    each,
    moved,
    pair,
    random_completions,
    take,
    take_objective,
)

SIDES = {"grouped": (Role.CANDIDATE, Role.CANDIDATE)}
# Each as it is, with a word that changes its reward, and with each modifier that it takes.
COMPARISONS = {
    f"{name} {values}": (name, values)
    for name, method in METHODS.items()
    if method.rewards
    for values in (
        {},
        *([WORDS[name]] if name in WORDS else []),
        *(IN_USE[modifier].active for modifier in sorted(method.modifiers)),
    )
}


@each(COMPARISONS)
def test_rewards_that_differ_by_rounding_are_ties_of_any_method(name, values):
    objective = objective_of(name, values)
    whole = random_completions(objective.rows, 8, roles=SIDES.get(objective.rows))
    # Before the first step: each token is as likely as under the reference.
    tokens = replace(whole.tokens, reference=whole.tokens.logps.detach())
    scores = torch.tensor([1.0, -1.0] * 8).double()
    whole = replace(whole, reference=whole.logps.detach(), tokens=tokens, scores=scores)
    if "reference" not in objective.needs:  # then both sides of a row are as likely, and as long
        # So likely that humanline clamps no token.
        sums, counts = (some.detach()[0::2] for some in (whole.logps / 50, whole.num_tokens))
        twice = (some.repeat_interleave(2).tolist() for some in (sums, counts.long()))
        same = completions(next(twice), num_tokens=next(twice), roles=whole.roles.tolist())
        whole = replace(same, scores=whole.scores, columns=whole.columns)
    gone_up, up_and_down = ([1.0, -1.0, 0.5, -1.0, 1.0, -0.5], [-1.0, 1.0, 1.0, -1.0, 0.0, 1.0])
    for by, noise, told in ((0.9, up_and_down, (0.5, 1.0)), (9.0, gone_up, (1.0, 0.0))):
        off = by * LEAST * torch.tensor([*noise, *noise, *noise[:4]]).double()
        rounded = moved(whole, logps=whole.logps.detach() + off)
        means = take_objective(objective, rounded, mismatched=MISMATCHED).means
        assert (means["rewards/accuracies"], means["rewards/ties"]) == told


def test_a_tie_is_scaled_as_the_reward_is():
    """Of 4 and 2 tokens; each sum may be off by 1e-4, so two of them by 2e-4."""

    def told(name, by, **values):
        whole = completions([-4.0 + by, -2.0], [-4.0, -2.0], num_tokens=[4, 2], roles=PAIR)
        return take(METHODS[name], whole, options=options_of(METHODS[name], values)).means

    def ties(name, *gaps, **values):
        return [told(name, by, **values)["rewards/ties"] for by in gaps]

    assert ties("dpo", 1.9e-4, -1.9e-4, 2.1e-4, beta=5.0) == [1.0, 1.0, 0.0]
    for name in ("cpo", "slic"):  # sums are equal at -2
        assert ties(name, 2 + 1.9e-4, 2 - 1.9e-4, 2 + 2.1e-4) == [1.0, 1.0, 0.0], name
    # Of means b (1e-4 / 4 + 1e-4 / 2) = b 7.5e-5, and r / n of the first is a quarter of `by`.
    for name in ("ipo", "dpo_norm", "simpo", "orpo"):
        assert ties(name, 2.9e-4, -2.9e-4, 3.1e-4) == [1.0, 1.0, 0.0], name
    odds = [told("orpo", by)["log_odds/accuracy"] for by in (2.9e-4, 3.1e-4, -3.1e-4)]
    assert odds == [0.5, 1.0, 0.0]


def test_a_divergence_that_flattens_makes_no_tie():
    # js of r is log 2 + LS(r), which differs by 4.5e-5 at 20 and 10; 1e-4 nats move it by 5e-9.
    whole = pair(-1.0, -11.0, reference=(-21.0, -21.0))
    taken = take(METHODS["dpo"], whole, modifiers=IN_USE["f_divergence"])
    assert taken.means["rewards/margins"] < 1e-5
    assert (taken.means["rewards/accuracies"], taken.means["rewards/ties"]) == (1.0, 0.0)


def test_a_tie_is_what_rounding_makes_in_the_dtypes_that_are_compared():
    roundings = {
        ("dpo", "float32", "float32"): 1e-4,
        ("dpo", "bfloat16", "float32"): 0.2,  # as much coarser as a token's: 2e-2 to 1e-5
        ("kto", "float32", "float16"): 0.05,
        ("simpo", "float32", "bfloat16"): 1e-4,  # it has no reference
        ("simpo", "float16", "float32"): 0.05,
        ("reward", "bfloat16", "bfloat16"): 0.02,  # one number, no sum
        ("reward", "float32", "bfloat16"): 1e-4,
    }
    for (name, *dtypes), rounding in roundings.items():
        found = objective_of(name, {}).computed_in(*dtypes).rounding
        assert found == pytest.approx(rounding), (name, dtypes)


def test_rewards_per_token_worked_by_hand():
    # r 3 over 1 token and 8 over 8: sums say 3 < 8, means 3 > 1; m is -1 and -1.125.
    whole = completions([-1.0, -9.0], [-4.0, -17.0], num_tokens=[1, 8], roles=PAIR)
    expected = {"dpo": -0.5, "ipo": 0.2, "dpo_norm": 10, "cpo": 0.8, "slic": 8, "simpo": 1.25}
    for name, margin in (expected | {"orpo": 0.0125}).items():
        means = take(METHODS[name], whole).means
        assert means["rewards/margins"] == pytest.approx(margin), name
        assert means["rewards/accuracies"] == float(margin > 0), name


def test_ranked_methods_report_what_stands_at_the_same_rank():
    # r_c is 1 and 5, r_l is 3 and 2: of the rows' own sides half are right, 1 < 3 and 5 > 2;
    # sorted, 1 < 2 and 5 > 3.
    whole = completions([1.0, 3.0, 5.0, 2.0], roles=PAIR * 2)
    taken = take(METHODS["aot_unpaired"], whole)
    assert taken.values["rewards/margins"].tolist() == pytest.approx([-0.1, 0.2])
    # lp_c - lp_l is -2 and 3, that of the reference -9 and 4: d is 7 and -1, the rows' own -6, 12.
    whole = completions([1.0, 3.0, 5.0, 2.0], [4.0, 0.0, 0.0, 9.0], roles=PAIR * 2)
    taken = take(METHODS["aot"], whole)
    assert taken.values["rewards/margins"].tolist() == pytest.approx([0.7, -0.1])
    assert taken.values["rewards/accuracies"].tolist() == [1.0, 0.0]
    assert taken.means["rewards/margins"] == pytest.approx(0.3)  # .1 (-6 + 12) / 2


ROUNDING = 2.0**-9  # of each ratio


LEAST_GAP = 2 * ROUNDING  # of two sides; and of means of several completions no more
D, U = Role.DESIRABLE, Role.UNDESIRABLE


def told_of(*rows):
    """Accuracy and ties of rows of (label, log-ratio) completions, rewards being half of those."""
    flat = [completion for row in rows for completion in row]
    whole = completions([ratio for _, ratio in flat], roles=[role for role, _ in flat])
    numbers = [number for number, row in enumerate(rows) for _ in row]
    part = Term(METHODS["kto_zero"], options_of(METHODS["kto_zero"], {"beta": 0.5}))
    objective = Objective((part,), rounding=ROUNDING)
    means = take_objective(objective, replace(whole, rows=torch.tensor(numbers))).means
    return [means.get(f"rewards/{name}") for name in ("accuracies", "ties")]


def test_a_row_is_right_when_its_desirable_completions_have_the_higher_mean():
    assert told_of([(D, 2.0), (U, 1.0)], [(U, -1.0), (D, 1.0)]) == [1.0, 0.0]
    assert told_of([(D, -3.0), (U, 1.0)], [(D, 1.0), (U, 1.0)]) == [0.25, 0.5]
    # desirable (4 + -1) / 2 = 1.5, undesirable (1 + 1 + 1) / 3 = 1; the sums are 3 and 3
    assert told_of([(D, 4.0), (D, -1.0), (U, 1.0), (U, 1.0), (U, 1.0)])[0] == 1.0
    # desirable (0 + 1) / 2 = 0.5, undesirable 0.75; the best completion is desirable
    assert told_of([(D, 0.0), (D, 1.0), (U, 0.75)])[0] == 0.0
    # Each row is judged against its own: 1 > 0 and 5 > 4, though 1 < 4.
    assert told_of([(D, 1.0), (U, 0.0)], [(D, 5.0), (U, 4.0)])[0] == 1.0


def test_labels_are_a_tie_where_rounding_of_both_sides_can_make_their_difference():
    for by, right in ((1, 0.5), (-1, 0.5), (1.25, 1.0), (-1.25, 0.0)):
        above = by * LEAST_GAP
        assert told_of([(D, 3.0 + above), (U, 3.0)])[0] == right
        sides = [(D, 2.0), (D, 4.0 + 2 * above), (U, 3.0), (U, 2.0), (U, 4.0)]
        assert told_of(sides)[0] == right


def test_a_row_of_one_label_or_of_a_reward_that_is_not_finite_has_no_accuracy():
    assert told_of([(D, 1.0)], [(U, 2.0), (U, 0.0)]) == [None, None]
    assert told_of([(D, 9.0)], [(D, 2.0), (U, 1.0)], [(U, -9.0)])[0] == 1.0
    assert told_of([(D, math.nan), (U, 0.0)], [(D, 1.0), (U, 0.0)])[0] == 1.0


def test_a_margin_of_labels_is_the_difference_of_the_means_of_a_whole_step():
    def reported(means):
        return objective_of("kto", {}).reported({name: Mean(means[name], 1) for name in means})

    means = {"rewards/chosen": 0.75, "rewards/rejected": -0.5, "loss": 0.4}
    assert reported(means) == means | {"rewards/margins": 1.25}
    for known in ({"rewards/chosen": 0.75}, means | {"rewards/margins": 0.75}):
        assert reported(known) == known
