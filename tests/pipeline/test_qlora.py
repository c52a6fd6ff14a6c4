"""A run whose frozen weights are in 4 bits, and settings that would have no effect."""

import json
import re

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from support.command import refusal

NF4 = ("--lora", "--set", "lora.quantize=nf4")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_run_in_four_bits_learns_an_adapter_for_the_plain_weights(course, tmp_path):
    folder = tmp_path / "run"
    said = " ".join(course.run(folder, *NF4, "--merge", "--method", "dpo").err.split())
    # The gate says how far from the reference it begins.
    (gap,) = re.findall(r"largest difference (\S+) nats per completion", said)
    assert float(gap) > 0.01  # NF4 has 16 values
    assert "begins near the reference of the cache, not at it" in said
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert losses[-1] < losses[0]
    # The adapter is for the plain weights, and is merged into them.
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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((*NF4, "--deepspeed", "zero3"), "Use --deepspeed zero2"),  # which would flatten them
        (("--set", "lora.quantize=nf4"), "Add --lora"),
        (("--set", "train.checkpoint_offload=true"), "train.gradient_checkpointing is off"),
        (("--set", "train.optimizer_dtype=bfloat16"), "the policy is trained in float32"),
        (
            ("--dtype", "bfloat16", "--set", "train.optimizer_dtype=bfloat16"),
            "Use --deepspeed zero2 or zero3",
        ),
        (("--set", "train.optimizer=lion", "--set", "train.epsilon=0.5"), "train.epsilon is set"),
        (("--set", "train.optimizer=adafactor", "--set", "train.beta1=0.5"), "train.beta1 is set"),
    ],
)
def test_a_setting_without_effect_or_that_does_not_go_with_another_is_refused(course, given, said):
    asked = ("train", "--cache", course.cache, "--method", "dpo", "--no-mlflow", *given)
    assert said in refusal(2, *asked)
