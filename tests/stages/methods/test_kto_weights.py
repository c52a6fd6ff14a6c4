import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.methods import Labels
from align.stages.methods.table import METHODS, options_of

KTO = METHODS["kto"]
counts = st.integers(1, 10**7)


def resolve_auto(desirable, undesirable, labels):
    weights = {"desirable_weight": desirable, "undesirable_weight": undesirable}
    return KTO.resolve_auto(options_of(KTO, weights), labels)


def weights_of(answer):
    return (answer.options.desirable_weight, answer.options.undesirable_weight)


@pytest.mark.parametrize(
    ("desirable", "undesirable", "labels", "weights"),
    [
        ("auto", "auto", Labels(300, 100), (1.0, 3.0)),
        ("auto", "auto", Labels(100, 300), (3.0, 1.0)),
        ("auto", 1.0, Labels(300, 100), (1 / 3, 1.0)),  # 1/3 * 300 = 1 * 100
        (1.0, "auto", Labels(300, 100), (1.0, 3.0)),
        ("auto", 2.0, Labels(100, 300), (6.0, 2.0)),  # 6 * 100 = 2 * 300
        (1.5, 1.0, Labels(100, 100), (1.5, 1.0)),
    ],
)
def test_auto_makes_both_labels_weigh_the_same(desirable, undesirable, labels, weights):
    answer = resolve_auto(desirable, undesirable, labels)
    assert weights_of(answer) == pytest.approx(weights)
    assert answer.advice == ()


@given(desirable=counts, undesirable=counts)
def test_auto_never_needs_advice_and_leaves_the_larger_label_at_one(desirable, undesirable):
    answer = resolve_auto("auto", "auto", Labels(desirable, undesirable))
    high, low = weights_of(answer)
    assert min(high, low) == 1.0
    assert high * desirable == pytest.approx(low * undesirable)
    assert answer.advice == ()


def test_weights_are_advised_against_outside_of_one_to_three_halves():
    for desirable, is_advised in ((100, False), (150, False), (151, True), (99, True)):
        answer = resolve_auto(1.0, 1.0, Labels(desirable, 100))
        assert bool(answer.advice) == is_advised, desirable


@given(desirable=counts, undesirable=counts, high=st.floats(0.1, 10), low=st.floats(0.1, 10))
def test_following_the_advice_ends_it(desirable, undesirable, high, low):
    labels = Labels(desirable, undesirable)
    for advice in resolve_auto(high, low, labels).advice:
        words = re.findall(r"method\.(\w+) between ([\d.e+-]+) and ([\d.e+-]*\d)", advice)
        middles = {name: (float(least) + float(most)) / 2 for name, least, most in words}
        assert middles.keys() == {"desirable_weight", "undesirable_weight"}
        assert resolve_auto(middles["desirable_weight"], low, labels).advice == ()
        assert resolve_auto(high, middles["undesirable_weight"], labels).advice == ()


def test_advice_names_the_numbers_it_comes_from():
    (advice,) = resolve_auto(1.0, 1.0, Labels(1000, 4000)).advice
    assert "weigh 0.25 times" in advice
    assert "1,000 x 1 to 4,000 x 1" in advice
    assert "method.desirable_weight between 4 and 6" in advice  # 4 * 1000 = 1 * 4000
    assert "method.undesirable_weight between 0.1667 and 0.25" in advice


def test_a_single_label_leaves_nothing_to_weigh_and_is_reported():
    for labels, only in ((Labels(5, 0), " desirable"), (Labels(0, 5), " undesirable")):
        answer = resolve_auto("auto", 2.0, labels)
        assert weights_of(answer) == (1.0, 2.0)
        (advice,) = answer.advice
        assert f"All training rows are{only}" in advice


def test_methods_without_class_weights_stay_as_they_are():
    options = METHODS["dpo"].options()
    answer = METHODS["dpo"].resolve_auto(options, Labels(1, 0))
    assert answer.options is options
    assert answer.advice == ()
