import itertools
import math
from dataclasses import replace

import pytest
import torch

from align.schemas.errors import UsageError
from align.schemas.methods import Labels
from align.schemas.rows import Role
from align.stages.methods.table import options_of, recipe_of
from support.method_steps import (
    LABELS,
    MPO,
    PAIR,
    Said,
    random_branches,
    rows_of,
    take,
    take_recipe,
)
from support.refusals import refuses


def test_a_mixture_worked_by_hand():
    # r_c = 4, r_l = -6 over 4 and 2 tokens of -2 nats, b .1: dpo ln(1 + e^-1) = .313262; bco_pair
    # ln(1 + e^-.4) + ln(1 + e^-.6) = .513015 + .437488 = .950503; sft 8 nats / 4 tokens.
    whole = rows_of([Said((1.0,) * 4), Said((-3.0,) * 2)], roles=PAIR)
    taken = take_recipe(recipe_of(MPO, {}), whole)
    assert taken.loss == pytest.approx(2.440710, abs=5e-7)  # .250610 + .190101 + 2
    assert taken.reported == pytest.approx(2.440710, abs=5e-7)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dpo:0.8+bco_pair:0.2", {"bco_pair": {"beta": 0.7}, "dpo": {"beta": 0.3}}),
        (MPO, {"row_weight": "weight"}),
        ("dpo+kto:0.5", {"kto": {"beta": 0.3, "desirable_weight": 1.3}}),
        ("bco:2+aot:0.25", {}),
        ("kto:0.3+sft+apo_zero_unpaired", {"kto": {"undesirable_weight": 2}}),
    ],
)
def test_a_mixture_is_the_weighted_sum_of_its_methods_each_with_its_own_options(name, values):
    recipe = recipe_of(name, values)
    whole = random_branches(recipe.rows, 7)
    dealt = [[0, 5, 1], [], [6, 2], [3, 4]]
    mixed = take_recipe(recipe, whole, mismatched=(0.4, -0.1), assignment=dealt)
    loss, gradient = 0.0, 0.0
    for part in recipe.parts:
        options = options_of(part.method, values.get(part.method.name, {}))
        seen = as_labelled(whole) if part.method.rows == "labelled" else whole
        how = {"options": options, "modifiers": recipe.modifiers, "mismatched": (0.4, -0.1)}
        alone = take(part.method, seen, **how)
        loss = loss + part.weight * alone.loss
        gradient = gradient + part.weight * alone.gradient
        assert alone.means.keys() <= mixed.means.keys()
        if part is recipe.parts[0]:  # what several report is named by the first
            assert alone.means == pytest.approx({key: mixed.means[key] for key in alone.means})
    assert mixed.loss == pytest.approx(loss, rel=1e-12)
    assert mixed.reported == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(mixed.gradient, gradient, rtol=1e-12, atol=1e-12)


def as_labelled(whole):
    """Chosen branches as desirable ones, rejected ones as undesirable ones."""
    roles = dict(zip(PAIR, LABELS, strict=True))
    labels = [roles.get(Role(role), role) for role in whole.roles.tolist()]
    return replace(whole, roles=torch.tensor(labels, dtype=torch.int8))


def test_a_step_without_a_branch_to_imitate_still_has_a_loss():
    whole = rows_of([Said((0.0,)), Said((0.0,))], roles=(Role.UNDESIRABLE,) * 2)
    taken = take_recipe(recipe_of("kto+sft:3", {}), whole, mismatched=(0.0,))
    assert taken.loss == taken.reported == 0.5
    assert "nll" not in taken.means


def test_a_mixture_learns_from_the_rows_all_of_its_methods_can_read():
    for order in itertools.permutations(["dpo", "kto", "sft"]):
        assert recipe_of("+".join(order), {}).rows == "paired", order
        without = [name for name in order if name != "dpo"]
        assert recipe_of("+".join(without), {}).rows == "labelled", order


def test_whichever_part_is_not_finite_its_row_is_to_blame():
    for bad in (math.nan, math.inf, -math.inf):
        whole = random_branches("paired", 4)
        with torch.no_grad():
            whole.logps[5] = bad  # the rejected branch of the third row: sft does not look at it
        losses = take_recipe(recipe_of("sft+dpo:0.5", {}), whole).losses
        assert (~losses.isfinite()).nonzero()[:, 0].tolist() == [4, 5], bad


def test_parts_that_want_other_mismatched_branches_are_refused():
    for option, value in (("kl_use", "all"), ("kl_per_step", 4)):
        for mixture in ("kto+kto_logsigmoid", "kto_logsigmoid+kto"):
            named = (f"method.kto_logsigmoid.{option} is {value}", f"method.kto.{option}")
            with refuses(UsageError, *named):
                recipe_of(mixture, {f"kto_logsigmoid.{option}": value})
        both = {f"kto.{option}": value, f"kto_logsigmoid.{option}": value}
        assert recipe_of("kto+kto_logsigmoid", both).option(option, None) == value


def test_a_recipe_tells_its_name_needs_and_options_and_is_read_again_from_them():
    recipe = recipe_of("dpo:0.8 + kto:0.25+sft", {"dpo.beta": 0.3, "kto.kl_per_step": 4})
    assert recipe.name == "dpo:0.8+kto:0.25+sft:1"
    assert recipe_of(recipe.name, recipe.values) == recipe
    assert recipe.needs == {"reference", "mismatched"}
    assert (recipe.values["dpo.beta"], recipe.values["kto.beta"]) == (0.3, 0.1)
    assert recipe.option("kl_per_step", 0) == 4
    assert recipe.option("nonsense", "otherwise") == "otherwise"
    single = recipe_of("dpo", {"beta": 0.3, "humanline": True, "log_eps_p": -2})
    assert single.values.items() >= {"beta": 0.3, "humanline": True, "log_eps_p": -2.0}.items()
    assert recipe_of(single.name, single.values) == single


def test_weights_of_labels_are_resolved_in_every_part():
    recipe = recipe_of("dpo+kto", {"kto.undesirable_weight": "auto"})
    resolved, _ = recipe.resolve_auto(Labels(desirable=10, undesirable=40))
    assert resolved.parts[0] == recipe.parts[0]
    assert resolved.parts[1].options.undesirable_weight == pytest.approx(0.25)


def test_each_part_sees_and_remembers_its_own_only():
    whole = random_branches("paired", 4)
    recipe = recipe_of("bco+aot+aot_unpaired", {})
    names = {name.partition("/")[0] for name in recipe.pre_pass(whole)}
    assert names == {"bco", "aot", "aot_unpaired"}
    taken = take_recipe(recipe, whole, state={"bco": (3.0, 0.5)})
    assert taken.state.keys() == {"bco"}
    assert taken.state["bco"][0] == 11.0
