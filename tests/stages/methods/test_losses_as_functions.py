"""The losses as functions of tensors: what the trainer computes, and figures worked by hand."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch

import align
from align.schemas.errors import UsageError
from align.schemas.methods import Step
from align.stages.methods import losses
from align.stages.methods.recipe import is_good
from align.stages.methods.table import METHODS, options_of
from support.method_steps import MISMATCHED, random_branches

NAMES = [name for name, method in METHODS.items() if method.rows != "grouped"]


def arguments_of(method, whole):
    """The tensors a person would pass for these branches."""
    given = SimpleNamespace(
        logps=whole.logps,
        reference=whole.reference,
        num_tokens=whole.num_tokens,
        scores=whole.logps if method.head == "score" else whole.scores,
    )
    named = {"logps": given.logps, "num_tokens": given.num_tokens, "scores": given.scores}
    named |= {"reference_logps": given.reference, "reference_scores": given.reference}
    values = {"labels": is_good(whole), "kl_logps": torch.tensor(MISMATCHED, dtype=torch.float64)}
    values["reference_kl_logps"] = torch.zeros(len(MISMATCHED), dtype=torch.float64)
    for name, tensor in named.items():
        values[name] = tensor
        before, _, last = name.rpartition("reference_")
        prefix = "reference_" if name.startswith("reference_") else before
        values[f"{prefix}chosen_{last}"] = tensor[0::2]
        values[f"{prefix}rejected_{last}"] = tensor[1::2]
    signature = inspect.signature(getattr(losses, method.name))
    return {name: values[name] for name in signature.parameters if name in values}


def step_of(method, whole, options):
    """One step of a trainer that holds these branches alone."""
    surveyed = method.survey(whole, options) if method.survey else {}
    return Step(
        rows=int(whole.rows.max()) + 1,
        branches=len(whole.logps),
        tokens=int(whole.num_tokens.sum()),
        chosen_tokens=int(whole.num_tokens[is_good(whole)].sum()),
        mismatched=torch.tensor(MISMATCHED, dtype=torch.float64),
        surveyed=surveyed,
        state=method.update_state((), surveyed) if method.update_state else (),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_function_gives_the_numbers_and_the_gradient_of_the_trainer(name):
    method = METHODS[name]
    whole = random_branches(method.rows, 5, seed=3)
    options = options_of(method, {})
    expected = method.loss(whole, step_of(method, whole, options), options).losses
    (gradient,) = torch.autograd.grad(expected.sum(), whole.logps)
    again = random_branches(method.rows, 5, seed=3)
    found = getattr(losses, name)(**arguments_of(method, again))
    assert torch.equal(found, expected)
    (found_gradient,) = torch.autograd.grad(found.sum(), again.logps)
    assert torch.allclose(found_gradient, gradient, rtol=1e-12, atol=1e-15)


def test_every_method_but_those_of_groups_has_a_function():
    assert sorted(NAMES) == dir(losses) == sorted(set(METHODS) - {"grpo", "ppo"})
    with pytest.raises(AttributeError, match="no 'grpo'"):
        _ = losses.grpo


def test_dpo_by_hand():
    found = align.losses.dpo([-10.0, -8.0], [-12.0, -7.0], [-11.0, -8.0], [-11.0, -8.0], beta=0.5)
    # margins: (1 - -1), (0 - 1): beta * 2 = 1 and beta * -1 = -0.5
    assert found.tolist() == pytest.approx([math.log1p(math.exp(-1)), math.log1p(math.exp(0.5))])


def test_kto_by_hand():
    found = align.losses.kto(
        torch.tensor([-3.0, -5.0]),
        torch.tensor([True, False]),
        torch.tensor([-4.0, -5.0]),
        torch.tensor([-6.0, -9.0]),
        torch.tensor([-7.0, -9.0]),
        beta=2.0,
        desirable_weight=3.0,
    )
    # z = (1 + 0) / 2; x = 2 * (1 - 0.5) and 2 * -(0 - 0.5)
    lost = 1 - 1 / (1 + math.exp(-1))
    assert found.tolist() == pytest.approx([3 * lost, lost])
    assert found.dtype == torch.float64


def test_auto_weights_are_those_of_the_labels_given():
    equal = [-1.0, -1.0, -1.0]
    labels = [True, False, False]
    given = {"desirable_weight": "auto", "undesirable_weight": "auto"}
    found = align.losses.kto_zero(equal, labels, equal, **given)
    assert found.tolist() == pytest.approx([2 * 0.5, 0.5, 0.5])


def test_bco_by_hand():
    found = align.losses.bco([-1.0, -4.0], [True, False], [-3.0, -4.0], beta=1.0)
    # rewards 2 and 0, their mean 1: x = 2 - 1 and -(0 - 1)
    assert found.tolist() == pytest.approx([math.log1p(math.exp(-1))] * 2)


def test_orpo_by_hand_and_only_with_lengths():
    mean = math.log(0.5)  # odds of one
    pair = ([2 * mean], [3 * mean])
    found = align.losses.orpo(*pair, chosen_num_tokens=[2], rejected_num_tokens=[3], lam=0.5)
    assert found.tolist() == pytest.approx([math.log(2) + 0.5 * math.log(2)])
    with pytest.raises(UsageError, match="Pass chosen_num_tokens and rejected_num_tokens"):
        align.losses.orpo(*pair)


@pytest.mark.parametrize(
    ("name", "options", "reads"),
    [
        ("dpo", {}, False),
        ("dpo", {"sft_weight": 0.5}, True),
        ("ipo", {}, True),
        ("ipo", {"normalize": "sum"}, False),
        ("cpo", {}, True),
        ("cpo", {"alpha": 0.0}, False),
        ("simpo", {}, True),
    ],
)
def test_lengths_are_required_where_the_loss_reads_them(name, options, reads):
    needed = len(arguments_of(METHODS[name], random_branches("paired", 1))) - 2
    call = [[-2.0]] * needed
    if reads:
        with pytest.raises(UsageError, match="num_tokens"):
            getattr(losses, name)(*call, **options)
    else:
        assert getattr(losses, name)(*call, **options).shape == (1,)


@pytest.mark.parametrize("name", ["kl_per_step", "kl_use", "margin", "betta"])
def test_an_option_that_the_loss_does_not_read_is_refused(name):
    with pytest.raises(TypeError, match=name):
        align.losses.kto([-1.0], [True], [-1.0], [-1.0], [-1.0], **{name: 1})


def test_a_bad_value_and_a_bad_shape_are_refused():
    with pytest.raises(UsageError, match=r"dpo: method\.beta: expected a number above 0, found -1"):
        align.losses.dpo([-1.0], [-1.0], [-1.0], [-1.0], beta=-1.0)
    with pytest.raises(UsageError, match=r"rejected_logps \[2\]"):
        align.losses.dpo([-1.0], [-1.0, -2.0], [-1.0], [-1.0])


def test_help_says_what_a_loss_takes():
    text = inspect.getdoc(align.losses.kto)
    assert "2402.01306" in text
    assert "how far the policy may go" in text
    assert list(inspect.signature(align.losses.bco).parameters) == [
        "logps",
        "labels",
        "reference_logps",
        "num_tokens",
        "beta",
    ]
