"""Adapters on the experts of a mixture, and on frozen weights in 4 bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model import model_folder
from align.stages.model.adapters import adapts_experts, add_lora
from align.stages.model.load import load_in_4_bits, load_model
from align.stages.model.policy import Policy, load_policy
from align.stages.model.save import save_adapter, save_merged
from support.engine_ranks import OPTIONS, Run, saved
from support.families import (
    MIXTURES,
    TREE_FAMILIES,
    learning_names,
    mixed_trees,
    saved_adapter,
    tiny_model,
)
from support.refusals import refuses
from support.tiny_policy import some_trees

pytestmark = pytest.mark.numeric

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
NF4 = LoraOptions(enabled=True, quantize="nf4")


def adapted(name, targets):
    model = tiny_model(*TREE_FAMILIES[name])
    return add_lora(model, LoraOptions(rank=2, targets=targets), seed=1)


@pytest.mark.parametrize("name", MIXTURES)
def test_fused_experts_are_adapted_where_they_are_named(name):
    model = adapted(name, ["q_proj", *EXPERTS])
    assert adapts_experts(model)
    assert sum("experts." in one for one in learning_names(Policy(model))) == 8
    assert not adapts_experts(adapted(name, ["q_proj"]))


@pytest.mark.parametrize(
    ("name", "target", "instead"),
    [
        ("granitemoe", "gate_proj", ""),
        ("gpt_oss", "up_proj", ""),
        ("llama", "k_porj", "k_proj"),
    ],
)
def test_a_target_of_which_nothing_is_found_is_refused(name, target, instead):
    for targets in ([target], ["q_proj", target]):
        with refuses(UsageError, "lora.targets", target, instead):
            adapted(name, targets)


def test_a_saved_adapter_of_experts_loads_and_merges(tmp_path):
    tiny_model(*MIXTURES["gpt_oss"]).save_pretrained(tmp_path / "base")
    options = ModelOptions(path=str(tmp_path / "base"), device="cpu")
    policy = Policy(add_lora(load_model(options), LoraOptions(rank=2, targets=EXPERTS), seed=1))
    learning = {name: one for name, one in policy.model.named_parameters() if one.requires_grad}
    for parameter in learning.values():
        torch.nn.init.normal_(parameter, std=0.1)
    expected = logps_of(policy)
    save_adapter(policy.model, learning, tmp_path / "base", tmp_path / "adapter")
    save_merged(options, tmp_path / "adapter", tmp_path / "merged", scores=False)
    for found in (
        replace(options, adapter=str(tmp_path / "adapter")),
        replace(options, path=str(tmp_path / "merged")),
    ):
        torch.testing.assert_close(logps_of(Policy(load_model(found))), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(logps_of(Policy(load_model(options))), expected, atol=0.1)


@torch.no_grad()
def logps_of(policy):
    return policy.eval()(mixed_trees())[0]


def packed(world, lora=NF4, **train):
    options = ModelOptions(path=str(world.model), device="cpu")
    return load_policy(options, TrainOptions(**{"dtype": "float32"} | train), lora)


def test_every_linear_layer_but_the_head_is_packed_and_evaluating_does_not_change_it(world):
    policy, plain = packed(world), packed(world, replace(NF4, quantize="none"))
    sizes = {name: parameter.numel() for name, parameter in plain.named_parameters()}
    for name, parameter in policy.named_parameters():
        if "_proj.base_layer" in name:  # half a byte for each weight
            assert (parameter.dtype, parameter.numel()) == (torch.uint8, sizes[name] / 2)
        else:
            assert (parameter.dtype, parameter.numel()) == (torch.float32, sizes[name])
    assert policy.path.head == plain.path.head == "fused"
    assert policy.path.layout == plain.path.layout
    before = [parameter.clone() for parameter in policy.parameters()]
    trees = some_trees(np.random.default_rng(0), 2)
    with torch.no_grad():
        first = policy.eval()(trees)  # for which some processors would pack the weights anew
    assert torch.equal(policy.train()(trees), first)
    assert all(map(torch.equal, before, policy.parameters()))


@pytest.mark.parametrize(("preset", "dtype"), [("zero0", "bfloat16"), ("zero1", "float32")])
def test_only_the_adapter_moves_and_a_run_resumes_bit_for_bit(
    one_rank, world, tmp_path, preset, dtype
):
    options = replace(OPTIONS, deepspeed=preset, dtype=dtype, epsilon=1e-8)

    def fresh():
        model = ModelOptions(path=str(world.model), device="cpu")
        return Run(one_rank, options, policy=load_policy(model, options, NF4))

    run = fresh()
    before = {name: one.clone() for name, one in run.engine.weights().items()}
    saved(run.steps(3, 5), tmp_path / "state")
    after = run.engine.weights()
    moved = {name for name in before if not torch.equal(after[name], before[name])}
    assert moved == {name for name in before if "lora_" in name}
    other = fresh()
    other.engine.load_state(tmp_path / "state")
    assert other.steps(5, 6).updates == run.steps(5, 6).updates[2:]
    assert other.weights(trainable_only=True) == run.weights(trainable_only=True)
    assert {kind for kind, _ in run.weights(trainable_only=True).values()} == {f"torch.{dtype}"}


def test_an_adapter_is_trained_further_on_packed_weights(world, tmp_path):
    adapter = saved_adapter(tmp_path / "old", world.model, target_modules=["q_proj", "up_proj"])
    options = ModelOptions(path=str(world.model), device="cpu", adapter=str(adapter))
    policy = load_policy(options, TrainOptions(dtype="bfloat16"), NF4)
    learning = {name: one for name, one in policy.model.named_parameters() if one.requires_grad}
    assert {(one.dtype, "lora_" in name) for name, one in learning.items()} == {
        (torch.float32, True)
    }
    assert any(one.dtype == torch.uint8 for one in policy.parameters())
    policy(some_trees(np.random.default_rng(0), 2))[0].sum().backward()
    assert all(one.grad.any() for one in learning.values())
    save_adapter(policy.model, learning, world.model, tmp_path / "new")
    before, after = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("old", "new")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_no_plain_model_or_lacks_bitsandbytes_is_refused(world, tmp_path, monkeypatch):
    options = ModelOptions(path=str(world.model), device="cpu", adapter=str(tmp_path))
    with refuses(UsageError, world.model, "adapter", "lora.quantize"):
        load_in_4_bits(options)
    monkeypatch.setattr(model_folder, "find_spec", lambda name: None)
    with refuses(UsageError, "lora.quantize=nf4", "pip install bitsandbytes"):
        model_folder.require_bitsandbytes("lora.quantize=nf4")
