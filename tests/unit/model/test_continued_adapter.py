"""An adapter that is trained further: it starts as the reference, and is saved in its own shape."""

import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model.load import load_causal_lm
from align.stages.model.model_folder import adapter_settings
from align.stages.model.policy import Policy, load_policy
from align.stages.model.reference import HfReference
from align.stages.model.save import save_adapter
from align.stages.model.transformers_compat import quiet
from support.families import HYBRID_FAMILIES, mixed_trees, saved_adapter, tiny_model
from support.refusals import refuses

pytestmark = pytest.mark.numeric

ON = LoraOptions(enabled=True)
TREES = tuple(mixed_trees())
SHAPES = {
    "plain": {},
    "patterns": {
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"up_proj": 2},
        "alpha_pattern": {"q_proj": 3},
    },
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "bias": {"lora_bias": True},
    "one layer": {"layers_to_transform": [1]},
    "dropout": {"lora_dropout": 0.5},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "whole layers": {"modules_to_save": ["norm"]},
}
VOLATILE = {"inference_mode"}


def settings_in(folder):
    stored = json.loads((folder / "adapter_config.json").read_text())
    stored["target_modules"].sort()  # peft stores a set
    return {name: value for name, value in stored.items() if name not in VOLATILE}


def shapes_in(folder):
    """The shapes of an adapter's own tensors; peft may store the frozen layer beside them."""
    stored = load_file(folder / "adapter_model.safetensors")
    return {name: one.shape for name, one in stored.items() if "base_layer" not in name}


@torch.no_grad()
def logps_of(policy):
    return policy.eval()(TREES)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_starts_as_the_reference_and_is_saved_in_its_own_shape(
    saved_llama, tmp_path, shape, dtype
):
    adapter = saved_adapter(tmp_path / "old", saved_llama, **SHAPES[shape])
    options = ModelOptions(path=str(saved_llama), dtype=dtype, adapter=str(adapter))
    reference = torch.from_numpy(HfReference(options).open().score(TREES))
    policy = load_policy(options, TrainOptions(dtype=dtype), ON)
    learning = {name: one for name, one in policy.model.named_parameters() if one.requires_grad}
    # DeepSpeed flattens weights of one dtype, and whole layers keep that of the base.
    is_cast = (shape, dtype) == ("whole layers", "bfloat16")
    found = {one.dtype for one in learning.values()}
    assert found == {torch.bfloat16 if is_cast else torch.float32}
    assert is_cast or torch.equal(logps_of(policy), reference)

    # Every weight of it learns.
    policy.train()
    policy(TREES)[0].sum().backward()
    assert all(one.grad.any() for one in learning.values())
    torch.optim.SGD(learning.values(), lr=1e-2).step()
    moved = logps_of(policy)
    assert not torch.equal(moved, reference)
    save_adapter(policy.model, learning, saved_llama, tmp_path / "new")
    assert settings_in(tmp_path / "new") == settings_in(adapter)
    assert shapes_in(tmp_path / "new") == shapes_in(adapter)
    assert len(shapes_in(adapter)) == len(learning)
    with quiet():
        base = load_causal_lm(replace(options, adapter=""))
        again = Policy(PeftModel.from_pretrained(base, tmp_path / "new"))
    assert is_cast or torch.equal(logps_of(again), moved)


def test_under_float16_it_is_in_float16_for_the_loss_scale(saved_llama, tmp_path):
    adapter = saved_adapter(tmp_path / "old", saved_llama)
    options = ModelOptions(path=str(saved_llama), adapter=str(adapter))
    policy = load_policy(options, TrainOptions(dtype="float16"), ON)
    assert {one.dtype for one in policy.parameters()} == {torch.float16}


def test_dropout_of_an_adapter_is_that_of_its_settings_where_it_is_on(saved_llama, tmp_path):
    adapter = saved_adapter(tmp_path / "old", saved_llama, lora_dropout=0.5)
    options = ModelOptions(path=str(saved_llama), adapter=str(adapter))
    for is_on in (True, False):
        policy = load_policy(options, TrainOptions(dtype="float32", dropout=is_on), ON)
        rates = [one.p for one in policy.modules() if isinstance(one, torch.nn.Dropout)]
        assert (0.5 in rates) == is_on


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("kasa_config", {"beta": 1}),
        ("peft_type", "IA3"),
    ],
)
def test_an_adapter_that_changes_its_base_while_it_loads_is_refused(
    saved_llama, tmp_path, setting, value
):
    adapter = saved_adapter(tmp_path / "old", saved_llama, r=4, lora_alpha=6)
    assert adapter_settings(str(adapter)) == {
        "rank": 4,
        "alpha": 6.0,
        "dropout": 0.0,
        "targets": ["q_proj"],
    }
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {setting: value}))
    with refuses(UsageError, file, setting, value):
        adapter_settings(str(adapter))


def test_an_adapter_that_a_kernel_would_ignore_is_refused(tmp_path):
    base, targets = tmp_path / "base", ["in_proj", "out_proj"]
    tiny_model(*HYBRID_FAMILIES["granitemoehybrid"]).save_pretrained(base)
    options = ModelOptions(path=str(base))
    with refuses(UsageError, "lora.targets", "mamba.out_proj"):
        load_policy(options, TrainOptions(), replace(ON, targets=targets))
    adapter = saved_adapter(tmp_path / "adapter", base, target_modules=targets)
    with refuses(UsageError, "mamba.out_proj", "--lora-start merge"):
        load_policy(replace(options, adapter=str(adapter)), TrainOptions(), ON)
