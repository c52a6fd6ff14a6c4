"""Frozen weights in 4 bits: what stays, what learns, and what cannot be packed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from align.schemas.config import LoraOptions, ModelOptions, TrainOptions
from align.schemas.errors import UsageError
from align.stages.model import quantized_base
from align.stages.model.policy import load_policy
from support.engine_ranks import OPTIONS, Run, saved
from support.tiny_policy import some_trees

NF4 = LoraOptions(enabled=True, quantize="nf4")
FLOAT32 = TrainOptions(dtype="float32")


@pytest.fixture
def packed_policy(world):
    return load_policy(ModelOptions(path=str(world.model), device="cpu"), FLOAT32, NF4)


def test_every_linear_layer_but_the_head_is_packed_to_half_a_byte_per_weight(world, packed_policy):
    options = ModelOptions(path=str(world.model), device="cpu")
    plain = load_policy(options, FLOAT32, replace(NF4, quantize="none"))
    sizes = {name: parameter.numel() for name, parameter in plain.named_parameters()}
    for name, parameter in packed_policy.named_parameters():
        if "_proj.base_layer" in name:
            assert (parameter.dtype, parameter.numel()) == (torch.uint8, sizes[name] / 2)
        else:
            assert (parameter.dtype, parameter.numel()) == (torch.float32, sizes[name])
    assert packed_policy.path.head == plain.path.head == "fused"
    assert packed_policy.path.layout == plain.path.layout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2"])
def test_only_the_adapter_moves_and_a_run_resumes_bit_for_bit(
    one_rank, world, tmp_path, preset, dtype
):
    options = replace(OPTIONS, deepspeed=preset, dtype=dtype, epsilon=1e-8)

    def fresh():
        model = ModelOptions(path=str(world.model), device="cpu")
        return Run(one_rank, options, policy=load_policy(model, options, NF4))

    run = fresh()
    before = {name: one.clone() for name, one in everything(run).items()}
    saved(run.steps(3, 5), tmp_path / "state")
    moved = {name for name, one in everything(run).items() if not torch.equal(one, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    other = fresh()
    other.engine.load_state(tmp_path / "state")
    assert other.steps(5, 6).updates == run.steps(5, 6).updates[2:]
    assert other.weights(trainable_only=True) == run.weights(trainable_only=True)
    assert {kind for kind, _ in run.weights(trainable_only=True).values()} == {f"torch.{dtype}"}


def everything(run):
    return dict(run.engine._engine.module.named_parameters())


def test_evaluating_does_not_change_what_is_packed(packed_policy):
    """Some processors would pack the weights anew for it."""
    before = [parameter.clone() for parameter in packed_policy.parameters()]
    trees = some_trees(np.random.default_rng(0), 2)
    packed_policy.eval()
    with torch.no_grad():
        first = packed_policy(trees)
    packed_policy.train()
    assert torch.equal(packed_policy(trees), first)
    assert all(map(torch.equal, before, packed_policy.parameters()))


def test_what_is_no_plain_model_is_refused(world, tmp_path):
    options = ModelOptions(path=str(world.model), device="cpu", adapter=str(tmp_path))
    with pytest.raises(UsageError, match="Merge them into a plain model first"):
        quantized_base.load_in_4_bits(options)


def test_without_bitsandbytes_the_message_says_what_to_install(world, monkeypatch):
    monkeypatch.setattr(quantized_base, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install bitsandbytes"):
        quantized_base.require_bitsandbytes("lora.quantize=nf4")
