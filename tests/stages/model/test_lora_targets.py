"""Adapters on the experts of a mixture, in one parameter for each layer."""

from dataclasses import replace

import pytest
import torch

from align.schemas.config import LoraOptions, ModelOptions
from align.schemas.errors import UsageError
from align.stages.model.load import add_lora, load_model
from align.stages.model.lora_targets import adapts_experts
from align.stages.model.policy import Policy
from align.stages.model.save import save_adapter, save_merged
from support.families import TREE_FAMILIES, learning_names, mixed_trees, tiny_model
from support.mixtures import MIXTURES

pytestmark = pytest.mark.numeric

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(name, targets):
    return add_lora(tiny_model(*MIXTURES[name]), LoraOptions(rank=2, targets=targets), seed=1)


@pytest.mark.parametrize("name", MIXTURES)
def test_fused_experts_can_be_named(name):
    model = adapted(name, ["q_proj", *EXPERTS])
    assert adapts_experts(model)
    assert sum("experts." in one for one in learning_names(Policy(model))) == 8


def test_whether_the_experts_are_left_out_is_known():
    assert not adapts_experts(adapted("qwen2_moe", []))
    assert not adapts_experts(adapted("gpt_oss", ["q_proj"]))
    assert adapts_experts(adapted("mixtral", EXPERTS[:1]))


@pytest.mark.parametrize("name", ["granitemoe", "gpt_oss"])
def test_a_target_of_which_nothing_is_found_is_refused(name):
    with pytest.raises(UsageError, match="no layer of this model is called gate_proj, up_proj"):
        adapted(name, ["q_proj", "gate_proj", "up_proj"])


def test_a_dense_model_refuses_it_too():
    model = tiny_model(*TREE_FAMILIES["llama"])
    with pytest.raises(UsageError, match="called k_porj"):
        add_lora(model, LoraOptions(targets=["q_proj", "k_porj"]), seed=1)


@pytest.mark.slow  # peft's import asks the machine what it is
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
