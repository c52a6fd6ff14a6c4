"""Rewards, margins and accuracies are of what the loss compares, over the whole table."""

import math
from dataclasses import replace

import pytest
import torch

from align.schemas.rows import LEAST, Role
from align.stages.methods.modifiers import sums_of
from align.stages.methods.recipe import Part, Recipe
from align.stages.methods.rewards import with_margin
from align.stages.methods.table import METHODS, options_of, recipe_of
from support.method_steps import (
    IN_USE,
    MISMATCHED,
    PAIR,
    ROLES,
    WORDS,
    branches,
    each,
    moved,
    pair,
    random_branches,
    reordered,
    take,
    take_recipe,
    unmoved,
)

# Options under which the loss is nothing but its comparison, and its advantages are the scores'.
BARE = {
    "cpo": {"alpha": 0},
    "discopop": {"beta": 8},  # so that few margins lie on its hump
    "ppo": {"lam": 1, "gamma": 1, "kl": 0},
}
SIDES = {"grouped": (Role.CANDIDATE, Role.CANDIDATE)}
COMPARING = {name: method for name, method in METHODS.items() if method.rewards}
# Each as it is, with a word that changes its reward, and with each modifier that it takes.
COMPARISONS = {
    f"{name} {values}": (name, values)
    for name, method in COMPARING.items()
    for values in (
        {},
        *([WORDS[name]] if name in WORDS else []),
        *(IN_USE[modifier].active for modifier in sorted(method.modifiers)),
    )
}


def two_sided(kind, rows, seed=0):
    """Rows of a good and a bad branch. Candidates are as long as each other, and near the start.

    What a clipped objective pushes down does not lie below what it pushes up otherwise.
    """
    whole = random_branches(kind, rows, seed, roles=SIDES.get(kind))
    if kind != "grouped":
        return whole
    logps = [-3.0 + 0.05 * math.sin(5.0 * place) for place in range(2 * rows)]
    same = branches(logps, [-3.0] * 2 * rows, num_tokens=[5] * 2 * rows, roles=whole.roles.tolist())
    return replace(same, scores=torch.tensor([1.0, -1.0] * rows).double(), columns=whole.columns)


def turned_round(whole):
    """The same rows with what the policy says of their good branch said of the bad one."""
    order = torch.arange(len(whole.roles)).view(-1, 2).flip(1).view(-1)
    tokens, counts = whole.tokens, whole.tokens.counts
    spans = torch.arange(int(counts.sum())).split(counts.tolist())
    here = torch.cat([spans[branch] for branch in order.tolist()])
    of_tokens = {name: getattr(tokens, name)[here] for name in ("reference", "purity")}
    of_tokens["logps"] = tokens.logps.detach()[here].requires_grad_()
    return replace(
        whole,
        logps=whole.logps.detach()[order].requires_grad_(),
        reference=whole.reference[order],
        num_tokens=whole.num_tokens[order],
        tokens=replace(tokens, counts=counts[order], **of_tokens),
    )


@each(COMPARISONS)
def test_the_accuracy_of_a_pair_says_which_way_round_its_loss_is_lower(name, values):
    recipe = recipe_of(name, BARE.get(name, {}) | values)
    found = []
    for row in range(8):
        whole = reordered(two_sided(recipe.rows, 8, seed=3), [row])
        right, wrong = (
            take_recipe(recipe, some, mismatched=MISMATCHED)
            for some in (whole, turned_round(whole))
        )
        is_lower = right.losses.sum() < wrong.losses.sum()
        assert right.means["rewards/accuracies"] == float(is_lower), row
        found.append(bool(is_lower))
    assert 0 < sum(found) < 8


def lowered(method, options):
    """A row whose policy began by saying the opposite, and followed the slope of the loss.

    The bad branch is long: per token it begins further above the good one than in all.
    """
    roles = SIDES.get(method.rows, ROLES[method.rows])
    whole = branches(
        [-400.0, -600.0],
        [-400.0, -750.0],
        num_tokens=[4, 30],
        roles=roles,
        scores=[1.0, -1.0],
    )
    if method.name == "discopop":  # between -tau and tau it pushes the wrong way
        whole = moved(whole, logps=torch.tensor([-300.0, -750.0]).double())
    for turn in range(45):
        taken = take(method, whole, options=options, mismatched=MISMATCHED)
        slopes = sums_of(taken.token_gradient, whole.tokens.counts)
        step = 60 * 0.82**turn * slopes.sign()
        whole = moved(whole, logps=(whole.logps.detach() - step).clamp(max=-1e-3))
    return take(method, whole, options=options, mismatched=MISMATCHED)


@each({name: (method,) for name, method in COMPARING.items()})
def test_a_policy_that_has_lowered_the_loss_as_far_as_it_goes_is_right(method):
    bare = BARE.get(method.name, {})
    other = {"label_smoothing": 0.3} if hasattr(method.options(), "label_smoothing") else {}
    for values in (bare, bare | other | WORDS.get(method.name, {})):
        taken = lowered(method, options_of(method, values))
        assert taken.means["rewards/accuracies"] == 1.0, values


@each(COMPARISONS)
def test_rewards_that_differ_by_rounding_are_ties_of_any_method(name, values):
    recipe = recipe_of(name, values)
    whole = unmoved(two_sided(recipe.rows, 8))
    if "reference" not in recipe.needs:  # then both sides of a row are as likely, and as long
        sums, counts = (some.detach()[0::2] for some in (whole.logps, whole.num_tokens))
        twice = (some.repeat_interleave(2).tolist() for some in (sums, counts.long()))
        same = branches(next(twice), num_tokens=next(twice), roles=whole.roles.tolist())
        whole = replace(same, scores=whole.scores, columns=whole.columns)
    gone_up, up_and_down = ([1.0, -1.0, 0.5, -1.0, 1.0, -0.5], [-1.0, 1.0, 1.0, -1.0, 0.0, 1.0])
    for by, noise, told in ((0.9, up_and_down, (0.5, 1.0)), (9.0, gone_up, (1.0, 0.0))):
        off = by * LEAST * torch.tensor([*noise, *noise, *noise[:4]]).double()
        rounded = moved(whole, logps=whole.logps.detach() + off)
        means = take_recipe(recipe, rounded, mismatched=MISMATCHED).means
        assert (means["rewards/accuracies"], means["rewards/ties"]) == told


def test_a_tie_is_scaled_as_the_reward_is():
    """Of 4 and 2 tokens; each sum may be off by 1e-4, so two of them by 2e-4."""

    def tied(name, by, **values):
        whole = branches([-4.0 + by, -2.0], [-4.0, -2.0], num_tokens=[4, 2], roles=PAIR)
        taken = take(METHODS[name], whole, options=options_of(METHODS[name], values))
        return taken.means["rewards/ties"]

    assert [tied("dpo", by, beta=5.0) for by in (1.9e-4, -1.9e-4, 2.1e-4)] == [1.0, 1.0, 0.0]
    for name in ("cpo", "slic"):  # sums are equal at -2
        assert [tied(name, 2 + by) for by in (1.9e-4, -1.9e-4, 2.1e-4)] == [1.0, 1.0, 0.0], name
    # Of means b (1e-4 / 4 + 1e-4 / 2) = b 7.5e-5, and r / n of the first is a quarter of `by`.
    for name in ("ipo", "dpo_norm", "simpo", "orpo"):
        assert [tied(name, by) for by in (2.9e-4, -2.9e-4, 3.1e-4)] == [1.0, 1.0, 0.0], name


def test_odds_are_a_tie_where_their_rewards_are():
    for by, right in ((2.9e-4, 0.5), (3.1e-4, 1.0), (-3.1e-4, 0.0)):
        taken = take(METHODS["orpo"], pair(-4.0 + by, -2.0, num_tokens=(4, 2)))
        assert taken.means["log_odds/accuracy"] == taken.means["rewards/accuracies"] == right


def test_a_divergence_that_flattens_makes_no_tie():
    # js of r is log 2 + LS(r), which differs by 4.5e-5 at 20 and 10; 1e-4 nats move it by 5e-9.
    whole = pair(-1.0, -11.0, reference=(-21.0, -21.0))
    taken = take(METHODS["dpo"], whole, modifiers=IN_USE["f_divergence"])
    assert taken.means["rewards/margins"] < 1e-5
    assert (taken.means["rewards/accuracies"], taken.means["rewards/ties"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("method", "policy", "reference", "rounding"),
    [
        ("dpo", "float32", "float32", 1e-4),
        ("dpo", "bfloat16", "float32", 0.2),  # as much coarser as a token's: 2e-2 to 1e-5
        ("kto", "float32", "float16", 0.05),
        ("simpo", "float32", "bfloat16", 1e-4),  # it has no reference
        ("simpo", "float16", "float32", 0.05),
        ("reward", "bfloat16", "bfloat16", 0.02),  # one number, no sum
        ("reward", "float32", "bfloat16", 1e-4),
    ],
)
def test_a_tie_is_what_rounding_makes_in_the_dtypes_that_are_compared(
    method, policy, reference, rounding
):
    found = recipe_of(method, {}).computed_in(policy, reference)
    assert found.rounding == pytest.approx(rounding)


def test_rewards_per_token_worked_by_hand():
    # r 8 over 4 tokens and 10 over 2: by sums -2, by means 2 - 5 = -3.
    wrong = branches([-4.0, -6.0], [-12.0, -16.0], num_tokens=[4, 2], roles=PAIR)
    # r 3 over 1 token and 8 over 8: sums say 3 < 8, means 3 > 1.
    split = branches([-1.0, -9.0], [-4.0, -17.0], num_tokens=[1, 8], roles=PAIR)
    told = {
        name: [take(METHODS[name], whole).means for whole in (wrong, split)]
        for name in ("dpo", "ipo", "dpo_norm", "cpo", "slic", "simpo", "orpo")
    }

    def of(name, metric):
        return [means[f"rewards/{metric}"] for means in told[name]]

    assert of("dpo", "margins") == pytest.approx([-0.2, -0.5])
    assert of("ipo", "margins") == pytest.approx([-0.3, 0.2])
    assert of("ipo", "accuracies") == [0.0, 1.0]
    assert of("dpo_norm", "chosen") == pytest.approx([10.0, 15.0])  # 5 * 2 and 5 * 3
    assert of("dpo_norm", "accuracies") == [0.0, 1.0]
    # lp -4 and -6 over 4 and 2 tokens, then -1 and -9 over 1 and 8: m -1, -3, then -1, -1.125.
    assert of("cpo", "margins") == pytest.approx([0.2, 0.8])
    assert of("slic", "margins") == pytest.approx([2.0, 8.0])
    assert of("simpo", "margins") == pytest.approx([20.0, 1.25])
    assert of("orpo", "margins") == pytest.approx([0.2, 0.0125])


def test_ranked_methods_report_what_stands_at_the_same_rank():
    # r_c is 1 and 5, r_l is 3 and 2: of the rows' own sides half are right, 1 < 3 and 5 > 2;
    # sorted, 1 < 2 and 5 > 3.
    whole = branches([1.0, 3.0, 5.0, 2.0], roles=PAIR * 2)
    taken = take(METHODS["aot_unpaired"], whole)
    assert taken.metrics["rewards/margins"].tolist() == pytest.approx([-0.1, 0.2])
    # lp_c - lp_l is -2 and 3, that of the reference -9 and 4: d is 7 and -1, the rows' own -6, 12.
    whole = branches([1.0, 3.0, 5.0, 2.0], [4.0, 0.0, 0.0, 9.0], roles=PAIR * 2)
    taken = take(METHODS["aot"], whole)
    assert taken.metrics["rewards/margins"].tolist() == pytest.approx([0.7, -0.1])
    assert taken.metrics["rewards/accuracies"].tolist() == [1.0, 0.0]
    assert taken.means["rewards/margins"] == pytest.approx(0.3)  # .1 (-6 + 12) / 2


def test_methods_without_rewards_compare_nothing():
    assert {name for name, method in METHODS.items() if not method.rewards} == {"sft", "csft"}


def test_what_a_method_rewards_is_told_by_the_table():
    assert METHODS["ipo"].rewards.formula.startswith("b r/n")
    assert all(method.rewards.formula for method in COMPARING.values())


ROUNDING = 2.0**-9  # of each ratio


def labelled(*rows):
    """Rows of (label, log-ratio) branches; + is desirable, - is not."""
    flat = [branch for row in rows for branch in row]
    roles = [Role.DESIRABLE if label == "+" else Role.UNDESIRABLE for label, _ in flat]
    numbers = [number for number, row in enumerate(rows) for _ in row]
    whole = branches([ratio for _, ratio in flat], roles=roles)
    return replace(whole, rows=torch.tensor(numbers))


def metrics(*rows):
    """What is reported of them where rewards are half of their ratios."""
    method = METHODS["kto_zero"]
    part = Part(method, options_of(method, {"beta": 0.5}))
    return take_recipe(Recipe((part,), rounding=ROUNDING), labelled(*rows)).metrics


def accuracies(*rows):
    return metrics(*rows)["rewards/accuracies"].tolist()


def ties(*rows):
    return metrics(*rows)["rewards/ties"].tolist()


def test_a_row_is_right_when_its_desirable_branch_has_the_higher_reward():
    assert accuracies([("+", 2.0), ("-", 1.0)]) == [1.0]
    assert accuracies([("+", -3.0), ("-", 1.0)]) == [0.0]
    assert accuracies([("-", -1.0), ("+", 1.0)]) == [1.0]


def test_equal_rewards_are_half_right():
    assert accuracies([("+", 1.0), ("-", 1.0)], [("+", 2.0), ("-", 1.0)]) == [0.5, 1.0]
    assert ties([("+", 1.0), ("-", 1.0)], [("+", 2.0), ("-", 1.0)]) == [1.0, 0.0]


def test_labels_are_a_tie_where_rounding_of_both_sides_can_make_their_difference():
    least = 2 * ROUNDING  # of two sides; and of means of several branches no more
    for above, right in ((least, 0.5), (-least, 0.5), (1.25 * least, 1.0), (-1.25 * least, 0.0)):
        assert accuracies([("+", 3.0 + above), ("-", 3.0)]) == [right]
        sides = [("+", 2.0), ("+", 4.0 + 2 * above), ("-", 3.0), ("-", 2.0), ("-", 4.0)]
        assert accuracies(sides) == [right]


def test_of_several_branches_the_means_are_compared():
    # desirable (4 + -1) / 2 = 1.5, undesirable (1 + 1 + 1) / 3 = 1; the sums are 3 and 3
    assert accuracies([("+", 4.0), ("+", -1.0), ("-", 1.0), ("-", 1.0), ("-", 1.0)]) == [1.0]
    # desirable (0 + 1) / 2 = 0.5, undesirable 0.75; the best branch is desirable
    assert accuracies([("+", 0.0), ("+", 1.0), ("-", 0.75)]) == [0.0]


def test_a_row_of_one_label_has_no_accuracy():
    assert accuracies([("+", 1.0)], [("-", 2.0), ("-", 0.0)]) == []
    assert ties([("+", 1.0)], [("-", 1.0), ("-", 1.0)]) == []
    assert accuracies([("+", 9.0)], [("+", 2.0), ("-", 1.0)], [("-", -9.0)]) == [1.0]


def test_labels_of_different_prompts_are_not_compared():
    # Each is judged against its own: 1 > 0 and 5 < 6, though 1 < 6 and 5 > 0.
    assert accuracies([("+", 1.0), ("-", 0.0)], [("+", 5.0), ("-", 6.0)]) == [1.0, 0.0]


def test_a_reward_that_is_not_finite_is_given_no_accuracy():
    assert accuracies([("+", float("nan")), ("-", 0.0)], [("+", 1.0), ("-", 0.0)]) == [1.0]


def test_rewards_and_log_probs_are_told_by_label():
    told = metrics([("+", 2.0), ("-", -4.0)], [("+", 6.0)])
    assert told["rewards/chosen"].tolist() == [1.0, 3.0]
    assert told["rewards/rejected"].tolist() == [-2.0]
    assert told["logps/chosen"].tolist() == [2.0, 6.0]  # the reference gives 0
    assert told["logps/rejected"].tolist() == [-4.0]


def test_a_margin_of_labels_is_the_difference_of_the_means_of_a_whole_step():
    means = {"rewards/chosen": 0.75, "rewards/rejected": -0.5, "loss": 0.4}
    assert with_margin(means) == means | {"rewards/margins": 1.25}
    alone = {"rewards/chosen": 0.75}
    assert with_margin(alone) == alone
    of_pairs = {"rewards/chosen": 1.0, "rewards/rejected": 0.0, "rewards/margins": 0.75}
    assert with_margin(of_pairs) == of_pairs
