"""A run whose frozen weights are in 4 bits, and the settings that spare memory."""

import json
import re

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from support.command import refusal

NF4 = ("--lora", "--set", "lora.quantize=nf4")


def refused(course, *arguments):
    return refusal(
        2, "train", "--cache", course.cache, "--method", "dpo", "--no-mlflow", *arguments
    )


@pytest.fixture(scope="module")
def packed_run(course, tmp_path_factory):
    """A run on packed weights, and what it said."""
    folder = tmp_path_factory.mktemp("qlora") / "run"
    answer = course.run(folder, *NF4, "--merge", "--method", "dpo")
    return folder, " ".join(answer.err.split())


def test_the_gate_says_how_far_four_bits_begin_from_the_reference(packed_run):
    _, said = packed_run
    (gap,) = re.findall(r"largest difference (\S+) nats per completion", said)
    assert float(gap) > 0.01  # NF4 has 16 values
    assert "in 4 bits the model begins near the reference of the cache, not at it" in said
    assert "reproduces the cached log-probs" not in said


def test_a_policy_in_four_bits_learns(packed_run):
    lines = map(json.loads, (packed_run[0] / "metrics.jsonl").read_text().splitlines())
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_its_adapter_is_loaded_on_the_plain_weights_and_is_merged_into_them(packed_run, course):
    folder, _ = packed_run
    settings = json.loads((folder / "model" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(course.model)
    plain = AutoPeftModelForCausalLM.from_pretrained(folder / "model").merge_and_unload()
    merged = load_file(folder / "model-merged" / "model.safetensors")
    base = load_file(course.model / "model.safetensors")
    assert merged.keys() == base.keys()
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}
    assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in merged.items())
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {name for name in base if "_proj" in name}


def test_what_zero_3_would_flatten_is_refused(course):
    said = refused(course, *NF4, "--deepspeed", "zero3")
    assert "lora.quantize is nf4, and train.deepspeed=zero3 is ZeRO 3" in said
    assert "Use --deepspeed zero2" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("lora.quantize=nf4", "no adapter is trained. Add --lora"),
        ("train.checkpoint_offload=true", "train.gradient_checkpointing is off"),
        ("train.optimizer_dtype=bfloat16", "the policy is trained in float32"),
    ],
)
def test_a_setting_without_effect_is_refused(course, given, said):
    assert said in refused(course, "--set", given)


@pytest.mark.parametrize(("name", "option"), [("lion", "epsilon"), ("adafactor", "beta1")])
def test_an_option_that_the_optimizer_does_not_read_is_refused(course, name, option):
    more = ("--set", f"train.optimizer={name}", "--set", f"train.{option}=0.5")
    said = refused(course, *more)
    assert f"train.{option} is set, and {name} (train.optimizer) has no use for it" in said


def test_master_weights_in_bfloat16_need_zero_2(course):
    more = ("--dtype", "bfloat16", "--set", "train.optimizer_dtype=bfloat16")
    assert "Use --deepspeed zero2 or zero3" in refused(course, *more)
