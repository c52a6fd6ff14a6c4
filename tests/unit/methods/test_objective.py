"""Objectives of methods: what is asked of them, their options and how those are refused."""

import itertools
import json
import math
import re
from dataclasses import replace
from typing import Literal, get_args, get_origin

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.errors import UsageError
from align.schemas.methods import Labels
from align.schemas.rows import Role
from align.stages.methods.method import STEP_OPTIONS
from align.stages.methods.method_docs import describe, render_method, render_table
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.objective import resolve_weights
from align.stages.methods.table import METHODS, objective_of, options_of
from support.method_steps import (
    BY_NAME,
    IN_USE,
    LABELS,
    MISMATCHED,
    MPO,
    PAIR,
    Said,
    each,
    random_completions,
    rows_of,
    take,
    take_objective,
)
from support.refusals import refuses


def test_a_mixture_worked_by_hand():
    # r_c = 4, r_l = -6 over 4 and 2 tokens of -2 nats, b .1: dpo ln(1 + e^-1) = .313262; bco_pair
    # ln(1 + e^-.4) + ln(1 + e^-.6) = .513015 + .437488 = .950503; sft 8 nats / 4 tokens.
    whole = rows_of([Said((1.0,) * 4), Said((-3.0,) * 2)], roles=PAIR)
    taken = take_objective(objective_of(MPO, {}), whole)
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
    objective = objective_of(name, values)
    whole = random_completions(objective.rows, 7)
    dealt = [[0, 5, 1], [], [6, 2], [3, 4]]
    mixed = take_objective(objective, whole, mismatched=(0.4, -0.1), assignment=dealt)
    loss, gradient = 0.0, 0.0
    for term in objective.terms:
        options = options_of(term.method, values.get(term.method.name, {}))
        seen = as_labelled(whole) if term.method.rows == "labelled" else whole
        how = {"options": options, "modifiers": objective.modifiers, "mismatched": (0.4, -0.1)}
        alone = take(term.method, seen, **how)
        loss = loss + term.weight * alone.loss
        gradient = gradient + term.weight * alone.gradient
        assert alone.means.keys() <= mixed.means.keys()
        if term is objective.terms[0]:  # what several report is named by the first
            assert alone.means == pytest.approx({key: mixed.means[key] for key in alone.means})
    assert mixed.loss == pytest.approx(loss, rel=1e-12)
    assert mixed.reported == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(mixed.gradient, gradient, rtol=1e-12, atol=1e-12)


def as_labelled(whole):
    """Chosen completions as desirable ones, rejected ones as undesirable ones."""
    roles = dict(zip(PAIR, LABELS, strict=True))
    labels = [roles.get(Role(role), role) for role in whole.roles.tolist()]
    return replace(whole, roles=torch.tensor(labels, dtype=torch.int8))


def test_a_step_without_a_completion_to_imitate_still_has_a_loss():
    whole = rows_of([Said((0.0,)), Said((0.0,))], roles=(Role.UNDESIRABLE,) * 2)
    taken = take_objective(objective_of("kto+sft:3", {}), whole, mismatched=(0.0,))
    assert taken.loss == taken.reported == 0.5
    assert "nll" not in taken.means


def test_a_mixture_learns_from_the_rows_all_of_its_methods_can_read():
    for order in itertools.permutations(["dpo", "kto", "sft"]):
        assert objective_of("+".join(order), {}).rows == "paired", order
        without = [name for name in order if name != "dpo"]
        assert objective_of("+".join(without), {}).rows == "labelled", order


def test_whichever_part_is_not_finite_its_row_is_to_blame():
    for bad in (math.nan, math.inf, -math.inf):
        whole = random_completions("paired", 4)
        with torch.no_grad():
            whole.logps[5] = (
                bad  # the rejected completion of the third row: sft does not look at it
            )
        losses = take_objective(objective_of("sft+dpo:0.5", {}), whole).losses
        assert (~losses.isfinite()).nonzero()[:, 0].tolist() == [4, 5], bad


def test_parts_that_want_other_mismatched_completions_are_refused():
    for option, value in (("kl_use", "all"), ("kl_per_step", 4)):
        for mixture in ("kto+kto_logsigmoid", "kto_logsigmoid+kto"):
            named = (f"method.kto_logsigmoid.{option} is {value}", f"method.kto.{option}")
            with refuses(UsageError, *named):
                objective_of(mixture, {f"kto_logsigmoid.{option}": value})
        both = {f"kto.{option}": value, f"kto_logsigmoid.{option}": value}
        assert objective_of("kto+kto_logsigmoid", both).option(option, None) == value


def test_a_objective_tells_its_name_needs_and_options_and_is_read_again_from_them():
    objective = objective_of("dpo:0.8 + kto:0.25+sft", {"dpo.beta": 0.3, "kto.kl_per_step": 4})
    assert objective.name == "dpo:0.8+kto:0.25+sft:1"
    assert objective_of(objective.name, objective.values) == objective
    assert objective.needs == {"reference", "mismatched"}
    assert (objective.values["dpo.beta"], objective.values["kto.beta"]) == (0.3, 0.1)
    assert objective.option("kl_per_step", 0) == 4
    assert objective.option("nonsense", "otherwise") == "otherwise"
    single = objective_of("dpo", {"beta": 0.3, "humanline": True, "log_eps_p": -2})
    assert single.values.items() >= {"beta": 0.3, "humanline": True, "log_eps_p": -2.0}.items()
    assert objective_of(single.name, single.values) == single


def test_weights_of_labels_are_resolved_in_every_part():
    objective = objective_of("dpo+kto", {"kto.undesirable_weight": "auto"})
    resolved, _ = objective.resolve_auto(Labels(desirable=10, undesirable=40))
    assert resolved.terms[0] == objective.terms[0]
    assert resolved.terms[1].options.undesirable_weight == pytest.approx(0.25)


def test_each_part_sees_and_remembers_its_own_only():
    whole = random_completions("paired", 4)
    objective = objective_of("bco+aot+aot_unpaired", {})
    names = {name.partition("/")[0] for name in objective.pre_pass(whole)}
    assert names == {"bco", "aot", "aot_unpaired"}
    taken = take_objective(objective, whole, state={"bco": (3.0, 0.5)})
    assert taken.state.keys() == {"bco"}
    assert taken.state["bco"][0] == 11.0


def test_a_first_pass_sees_what_the_loss_sees():
    """The sorted ratios of a single pair are those of the pair, as dpo compares them."""
    pair = random_completions("paired", 1)
    for modifier in METHODS["aot_unpaired"].modifiers:
        alone, whole = (
            take(METHODS[name], pair, modifiers=IN_USE[modifier]).loss
            for name in ("aot_unpaired", "dpo")
        )
        assert alone == pytest.approx(whole, rel=1e-12), modifier


KTO = METHODS["kto"]
counts = st.integers(1, 10**7)


@each(BY_NAME)
def test_no_option_takes_what_it_cannot_use(method):
    for name, field in method.options.model_fields.items():
        texts = () if field.annotation is str else ("nonsense",)
        for value in (math.nan, math.inf, -1.0, -1, True, None, [], *texts):
            with refuses(UsageError, f"method.{name}"):
                options_of(method, {name: value})


# Of an option in several methods, the usual default; any other option is 0 or empty.
USUAL = {
    "beta": 0.1,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "eta": 1.0,
    "sft_normalize": "mean",
    "nll_scope": "pair",
    "kl_use": "rotate",
}
OWN = {
    "cdpo": {"label_smoothing": 0.2},
    "robust": {"label_smoothing": 0.1},
    "exo": {"label_smoothing": 0.001},
    "discopop": {"beta": 0.05, "tau": 0.05},
    "ipo": {"normalize": "mean"},
    "dpo_norm": {"beta": 5.0},
    "orpo": {"lam": 0.1},
    "simpo": {"beta": 10.0, "gamma_ratio": 0.3},
    "cpo": {"alpha": 1.0},
    "slic": {"delta": 1.0, "lam": 0.1, "normalize": "sum"},
    "grpo": {
        "beta": 0.01,
        "epsilon": 0.2,
        "normalize": "tokens",
        "std": "sample",
        "std_epsilon": 0.0001,
    },
    "ppo": {
        "epsilon": 0.5,
        "lam": 0.95,
        "gamma": 0.99,
        "vf": 0.01,
        "kl": 0.1,
        "value_target": "gae",
    },
    "csft": {"good_token": "<|good|>", "bad_token": "<|bad|>"},
}


@each(BY_NAME)
def test_a_method_without_options_is_of_these_defaults(method):
    options = {name: value for name, value in options_of(method, {}) if value}
    usual = {name: USUAL[name] for name in method.options.model_fields if name in USUAL}
    assert options == usual | OWN.get(method.name, {})


def test_modifiers_are_off_by_default_and_bounded_like_this():
    assert {name: value for name, value in Modifiers() if value} == {
        "f_divergence": "reverse_kl",
        "f_alpha": 0.5,
        "ld_alpha": 1.0,
        "log_eps_p": -1.0,
        "log_eps_r": 1.5,
    }


def others_of(field):
    """Other values of an option than its default: every other word, or a number within bounds."""
    if get_origin(field.annotation) is Literal:
        return [word for word in get_args(field.annotation) if word != field.default]
    if isinstance(field.default, str):
        return ["<other>"]
    return [0.8 * (field.default or 0.25) if field.annotation is not int else 3]


@each(
    {
        f"{name} {option}": (method, option)
        for name, method in METHODS.items()
        for option in method.options.model_fields
        if option not in STEP_OPTIONS  # which the plan of a step reads
    }
)
def test_each_option_is_read(method, option):
    base = {"sft_weight": 0.25} if option == "sft_normalize" else {}
    for value in others_of(method.options.model_fields[option]):
        plain, other = (options_of(method, values) for values in (base, {**base, option: value}))
        if method.context:
            assert method.context(plain) != method.context(other)
            continue
        whole = random_completions(method.rows, 12)
        losses = [
            take(method, whole, options=options, mismatched=MISMATCHED).losses
            for options in (plain, other)
        ]
        assert not torch.equal(*losses), value


# A method, its options, and the names in the refusal.
REFUSED = [
    ("dpo", {"beta": 0}, "method.beta", "0"),
    ("dpo", {"label_smoothing": 0.5}, "method.label_smoothing", "0.5"),
    ("exo", {"label_smoothing": 0}, "method.label_smoothing", "0"),
    ("kto", {"beat": 1}, "'method.beat'", "'beta'"),
    ("kto", {"kl_use": "rotat"}, "method.kl_use", "rotate", "all"),
    ("kto", {"kl_per_step": 1.5}, "method.kl_per_step", "1.5"),
    ("grpo", {"epsilon": 0}, "method.epsilon"),
    ("ppo", {"epsilon": 1}, "method.epsilon"),
    ("ppo", {"lam": 1.1}, "method.lam"),
    ("ppo", {"gamma": 1.1}, "method.gamma"),
    ("dpo", {"f_alpha": 0.3, "f_divergence": "js"}, "f_alpha", "method.f_divergence"),
    ("dpo", {"log_eps_r": 2.0}, "log_eps_r", "method.humanline"),
    ("dpo", {"log_eps_p": 0.0, "humanline": True}, "method.log_eps_p"),
    ("dpo", {"log_eps_r": 0, "humanline": True}, "method.log_eps_r"),
    ("dpo", {"ld_alpha": -0.1}, "method.ld_alpha"),
    ("dpo", {"f_divergence": "kl"}, "method.f_divergence", "reverse_kl", "'kl'"),
    ("dpo", {"f_alpha": math.inf, "f_divergence": "alpha"}, "method.f_alpha"),
    ("dpo+dpo", {}, "'dpo+dpo'", "once"),
    ("dpo+kot", {}, "'kot'", "'kto'"),
    ("dpo:0+sft", {}, "'dpo:0'", "'0'"),
    ("dpo:inf+sft", {}, "'dpo:inf'", "'inf'"),
    ("dpo:2", {}, "'dpo:2'", "mixture"),
    ("dpo+reward", {}, "dpo and reward"),
    ("dpo+grpo", {}, "grpo"),
    ("dpo+sft", {"beta": 1}, "method.beta", "method.dpo.beta"),
    ("dpo+sft", {"kto.beta": 1}, "method.kto.beta"),
    ("dpo+sft", {"dpo": {"beat": 1}}, "'method.dpo.beat'", "'beta'"),
    ("dpo+sft", {"dpo.beta": 0}, "method.dpo.beta", "0"),
    ("dpo+kto", {"margin": "wanted"}, "method.margin", "kto"),
    ("KTO", {}, "'KTO'", "'kto'"),
    ("apo", {}, "'apo_zero'", "'apo_down'", "'apo_zero_unpaired'"),
    ("", {}, "dpo"),
]


@each({f"{name} {values}": (name, values, names) for name, values, *names in REFUSED})
def test_a_refusal_says_which_option_or_method_and_what_it_may_be(name, values, names):
    with refuses(UsageError, *names):
        objective_of(name, values)


@each(BY_NAME)
def test_a_method_is_told_with_its_source_and_every_option_and_its_default(method):
    text = render_method(method)
    for name, default in method.options():
        shown = default if isinstance(default, str) else f"{default:g}"
        assert any(line.split()[:2] == [name, shown] for line in text.splitlines()), name
    assert method.source in text
    assert method.name in render_table([method])
    plain = json.loads(json.dumps(describe(method)))
    assert (plain["name"], set(plain["needs"])) == (method.name, method.needs)
    assert [option["name"] for option in plain["options"]] == [*method.options.model_fields]


def weigh(desirable, undesirable, labels):
    """The weights that these options become, and the advice on them."""
    weights = {"desirable_weight": desirable, "undesirable_weight": undesirable}
    options, advice = resolve_weights(options_of(KTO, weights), labels)
    return (options.desirable_weight, options.undesirable_weight), advice


def test_auto_makes_both_labels_weigh_the_same():
    for desirable, undesirable, labels, weights in (
        ("auto", 1.0, Labels(300, 100), (1 / 3, 1.0)),  # 1/3 * 300 = 1 * 100
        (1.0, "auto", Labels(300, 100), (1.0, 3.0)),
        ("auto", 2.0, Labels(100, 300), (6.0, 2.0)),  # 6 * 100 = 2 * 300
    ):
        assert weigh(desirable, undesirable, labels) == (pytest.approx(weights), "")


@given(desirable=counts, undesirable=counts)
def test_two_autos_leave_the_larger_label_at_one_and_need_no_advice(desirable, undesirable):
    (high, low), advice = weigh("auto", "auto", Labels(desirable, undesirable))
    assert min(high, low) == 1.0
    assert high * desirable == pytest.approx(low * undesirable)
    assert not advice


@given(desirable=counts, undesirable=counts, high=st.floats(0.1, 10), low=st.floats(0.1, 10))
def test_following_the_advice_ends_it(desirable, undesirable, high, low):
    labels = Labels(desirable, undesirable)
    if advice := weigh(high, low, labels)[1]:
        (found,) = re.findall(r"desirable_weight between ([\d.e+-]+) and ([\d.e+-]*\d)", advice)
        assert not weigh(sum(map(float, found)) / 2, low, labels)[1]


def test_weights_are_advised_against_outside_of_one_to_three_halves_or_of_a_single_label():
    for desirable, is_advised in ((100, False), (150, False), (151, True), (99, True)):
        assert bool(weigh(1.0, 1.0, Labels(desirable, 100))[1]) == is_advised, desirable
    for labels, only in ((Labels(5, 0), " desirable"), (Labels(0, 5), "undesirable")):
        weights, advice = weigh("auto", 2.0, labels)
        assert weights == (1.0, 2.0)
        assert only in advice
