"""Rows beside log-probs: collision log-probs, and values read from hidden states."""

from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model.policy import (
    Policy,
    load_policy,
    read_value_head,
    stored_value_head,
    turn_dropout_off,
    value_head,
)
from align.stages.model.save import save_value_head
from support.branch_by_branch import num_tokens, own_predictions, slopes_of, worst_parameter
from support.families import TREE_FAMILIES, mixed_trees, tiny_model
from support.refusals import refuses

pytestmark = pytest.mark.numeric

TREES = tuple(mixed_trees())
SLOPES = slopes_of(num_tokens(TREES)), slopes_of(num_tokens(TREES), seed=1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_values_purity_and_gradients_are_those_of_the_models_own_states(name, flex_on_cpu):
    """The loss has a share of the collision log-probs, which has no gradient."""
    model = tiny_model(*TREE_FAMILIES[name])
    turn_dropout_off(model)
    policy = drawn(Policy(deepcopy(model), head="values", collision_logps=True))
    assert policy.output_names == ("logps", "collision_logps", "values")
    own = by_itself(model, policy.value_head)
    fastest = policy.path.layout
    ways = [(fastest, "fused"), (fastest, "exact"), ("plain", "exact")]
    for layout, head in [*ways, ("flex", "fused")] if name == "gemma2" else ways:
        policy.path = replace(policy.path, layout=layout, head=head)
        policy.zero_grad()
        logps, collision_logps, values = policy(TREES)
        assert ((values - own.values).abs() < 1e-5 * own.sizes).all(), (head, layout)
        torch.testing.assert_close(collision_logps.double(), own.collision_logps, atol=1e-4, rtol=0)
        assert (collision_logps <= 0).all()
        (loss_of(logps, values) + 7 * collision_logps.sum()).backward()
        assert worst_parameter(policy, own.model) < 1e-5, (head, layout)


def test_a_model_may_end_in_states_narrower_than_its_layers():
    model = tiny_model("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16})
    turn_dropout_off(model)
    policy = drawn(Policy(deepcopy(model), head="values"))
    own = by_itself(model, policy.value_head)
    assert ((policy(TREES)[1] - own.values).abs() < 1e-5 * own.sizes).all()


def test_values_begin_at_zero_and_do_not_pull_at_the_policy(llama):
    policy = Policy(llama, head="values")
    assert policy.output_names == ("logps", "values")
    values = policy(TREES)[1]
    assert not values.any()
    (values - 1).square().sum().backward()
    assert policy.value_head.weight.grad.any()
    assert policy.value_head.bias.grad == -2 * num_tokens(TREES)
    others = [p.grad for name, p in policy.named_parameters() if "value_head" not in name]
    assert not any(gradient.any() for gradient in others)


def test_a_half_precision_head_is_multiplied_in_float32(saved_llama):
    options = ModelOptions(path=str(saved_llama)), TrainOptions(dtype="bfloat16"), LoraOptions()
    policy = drawn(load_policy(*options, head="values"))
    assert policy.value_head.weight.dtype == torch.bfloat16
    states = torch.randn(5, 32).to(torch.bfloat16)
    weight, bias = (p.detach().double() for p in policy.value_head.parameters())
    found = policy.value_head(states).detach()
    assert found.dtype == torch.float32
    wanted = states.double() @ weight.t() + bias
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)


def test_a_saved_head_is_read_again_or_refused_by_name(llama, tmp_path):
    policy = drawn(Policy(llama, head="values"))
    head = {name: tensor.detach().clone() for name, tensor in policy.value_head.named_parameters()}
    save_value_head(head, tmp_path)
    file = stored_value_head(ModelOptions(path=str(tmp_path)))
    again = value_head(llama)
    read_value_head(again, file)
    assert all(torch.equal(head[name], found) for name, found in again.named_parameters())
    in_half = {name: tensor.bfloat16() for name, tensor in head.items()}
    for weights, told in (
        (head | {"weight": head["weight"][:, :8].contiguous()}, "weight"),
        (head | {"more": head["bias"].clone()}, "more"),
        ({"weight": head["weight"]}, "bias"),
        (in_half | {"bias": in_half["bias"] / 0}, "bias"),
    ):
        save_value_head(weights, tmp_path)
        with refuses(UsageError, file, told):
            read_value_head(again, file)
    assert stored_value_head(ModelOptions(path=str(tmp_path / "elsewhere"))) is None
    # With an adapter, the head that was trained with the adapter.
    (tmp_path / "adapter").mkdir()
    save_value_head(head, tmp_path / "adapter")
    both = ModelOptions(path=str(tmp_path), adapter=str(tmp_path / "adapter"))
    assert stored_value_head(both).parent.name == "adapter"


def drawn(policy):
    """Other values than those it begins with."""
    with torch.no_grad():
        for seed, parameter in enumerate(policy.value_head.parameters()):
            parameter.copy_(slopes_of(parameter.numel(), seed=seed).view_as(parameter))
    return policy


@dataclass(frozen=True)
class Own:
    """What a model and a value head make of branches in float64; the model holds gradients."""

    model: nn.Module
    values: torch.Tensor
    sizes: torch.Tensor  # what each value is the sum of, without signs: of it rounding is a part
    collision_logps: torch.Tensor


def by_itself(model, value_head):
    both = nn.Module()
    both.model, both.value_head = deepcopy(model).double().train(), nn.Linear(1, 1)
    for name, parameter in value_head.named_parameters():
        setattr(both.value_head, name, nn.Parameter(parameter.detach().double()))
    states, logits, targets = own_predictions(both.model, TREES)
    values = both.value_head(states).squeeze(1)
    every = torch.log_softmax(logits, -1)
    loss_of(every.gather(1, targets[:, None]).squeeze(1), values).backward()
    weight, bias = (p.detach().abs() for p in both.value_head.parameters())
    return Own(
        both,
        values.detach(),
        (states.detach().abs() @ weight.t() + bias).squeeze(1),
        every.detach().mul(2).logsumexp(1),
    )


def loss_of(logps, values):
    return (logps * SLOPES[0]).sum() + (values * SLOPES[1]).sum()
