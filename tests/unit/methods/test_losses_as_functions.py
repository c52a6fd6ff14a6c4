"""The losses as functions of tensors: they give what the trainer computes, of what they are given.

Figures that are worked by hand show in which order the tensors come.
"""

import inspect
import math

import pytest
import torch

import align
from align.schemas.errors import UsageError
from align.stages.methods import api as losses
from align.stages.methods.objective import is_good
from align.stages.methods.table import METHODS, options_of
from support.method_steps import MISMATCHED, WORDS, each, random_completions, step_of, take
from support.refusals import refuses

NAMES = [name for name, method in METHODS.items() if method.rows != "grouped"]


def arguments_of(name, whole):
    """The tensors a person would pass for these completions."""
    zero_point = torch.tensor(MISMATCHED, dtype=torch.float64)
    values = {
        "labels": is_good(whole),
        "kl_logps": zero_point,
        "reference_kl_logps": torch.zeros_like(zero_point),
    }
    of_completions = {
        "logps": whole.logps,
        "num_tokens": whole.num_tokens,
        "scores": whole.logps if METHODS[name].head == "score" else whole.scores,
        "reference_logps": whole.reference,
        "reference_scores": whole.reference,
    }
    for of_all, tensor in of_completions.items():
        _, prefix, last = of_all.rpartition("reference_")
        values[of_all] = tensor
        values[f"{prefix}chosen_{last}"] = tensor[0::2]
        values[f"{prefix}rejected_{last}"] = tensor[1::2]
    signature = inspect.signature(getattr(losses, name))
    return {name: values[name] for name in signature.parameters if name in values}


@each({f"{name} {own}": (name, own) for name in NAMES for own in ({}, WORDS.get(name, {}))})
def test_a_function_gives_the_numbers_and_the_gradient_of_the_trainer(name, own):
    method = METHODS[name]
    whole, again = (random_completions(method.rows, 5, seed=3) for _ in range(2))
    expected = take(method, whole, mismatched=MISMATCHED, options=options_of(method, own))
    found = getattr(losses, name)(**arguments_of(name, again), **own)
    assert torch.equal(found, expected.losses)
    items = getattr(step_of(whole), method.items)
    (gradient,) = torch.autograd.grad(found.sum() / items, again.logps)
    assert torch.allclose(gradient, expected.gradient, rtol=1e-12, atol=1e-15)


def test_every_method_but_those_of_groups_has_a_function():
    assert sorted(NAMES) == dir(losses)
    with refuses(AttributeError, "grpo"):
        _ = losses.grpo


def test_tensors_come_in_the_order_of_the_figures_worked_by_hand():
    found = align.losses.dpo([-10.0, -8.0], [-12.0, -7.0], [-11.0, -8.0], [-11.0, -8.0], beta=0.5)
    # margins: (1 - -1), (0 - 1): beta * 2 = 1 and beta * -1 = -0.5
    assert found.tolist() == pytest.approx([math.log1p(math.exp(-1)), math.log1p(math.exp(0.5))])
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
    # Automatic weights are those of the labels given.
    given = {"desirable_weight": "auto", "undesirable_weight": "auto"}
    found = align.losses.kto_zero([-1.0] * 3, [True, False, False], [-1.0] * 3, **given)
    assert found.tolist() == pytest.approx([2 * 0.5, 0.5, 0.5])


def test_lengths_are_required_where_the_loss_reads_them():
    reading = [("dpo", {"sft_weight": 0.5}), ("ipo", {}), ("cpo", {}), ("simpo", {}), ("orpo", {})]
    free = [("dpo", {}), ("ipo", {"normalize": "sum"}), ("cpo", {"alpha": 0.0})]
    for name, options in reading + free:
        given = arguments_of(name, random_completions("paired", 1))
        assert getattr(losses, name)(**given, **options).shape == (1,)
        del given["chosen_num_tokens"], given["rejected_num_tokens"]
        if (name, options) in free:
            assert getattr(losses, name)(**given, **options).shape == (1,)
        else:
            with refuses(UsageError, "chosen_num_tokens", "rejected_num_tokens"):
                getattr(losses, name)(**given, **options)
    # Of a policy that is its reference only the gradient depends on them.
    with refuses(UsageError, "chosen_num_tokens", "rejected_num_tokens"):
        align.losses.ipo([-1.0], [-2.0], [-1.0], [-2.0])


def test_what_the_loss_does_not_read_and_what_does_not_fit_is_refused():
    for name in ("kl_per_step", "kl_use", "margin", "betta"):
        with refuses(TypeError, name):
            align.losses.kto([-1.0], [True], [-1.0], [-1.0], [-1.0], **{name: 1})
    with refuses(UsageError, "dpo", "method.beta", "-1"):
        align.losses.dpo([-1.0], [-1.0], [-1.0], [-1.0], beta=-1.0)
    with refuses(UsageError, "rejected_logps [2]"):
        align.losses.dpo([-1.0], [-1.0, -2.0], [-1.0], [-1.0])
