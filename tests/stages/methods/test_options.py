"""The options of methods: what they may be, what `auto` makes of them, and how they are told."""

import json
import math
import re
from typing import Literal, get_args, get_origin

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.errors import UsageError
from align.schemas.methods import Labels
from align.stages.methods.method import STEP_OPTIONS
from align.stages.methods.method_docs import describe, render_method, render_table
from align.stages.methods.recipe import resolve_weights
from align.stages.methods.table import METHODS, options_of, recipe_of
from support.method_steps import BY_NAME, MISMATCHED, each, random_branches, take
from support.refusals import refuses

KTO = METHODS["kto"]
counts = st.integers(1, 10**7)


@each(BY_NAME)
def test_no_option_takes_what_it_cannot_use(method):
    for name, field in method.options.model_fields.items():
        texts = () if field.annotation is str else ("nonsense",)
        for value in (math.nan, math.inf, -1.0, -1, True, None, [], *texts):
            with refuses(UsageError, f"method.{name}"):
                options_of(method, {name: value})


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
        whole = random_branches(method.rows, 12)
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
        recipe_of(name, values)


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
