"""Models with a vision tower, loaded for text: only their language model is in memory."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model.load import empty_model, load_causal_lm, resolve, unused_weights
from align.stages.model.policy import load_policy
from align.stages.model.reference import TreeScorer
from align.stages.model.save import save_adapter, save_whole
from align.stages.model.transformers_compat import quiet
from support.composites import COMPOSITES, is_text, save_composite
from support.families import COMMON, MOE
from support.refusals import refuses

IDS = torch.arange(1, 60)[None]
TRAIN = TrainOptions(dtype="float32")


@pytest.fixture(scope="module", params=COMPOSITES)
def folder(request, tmp_path_factory, tokenizer_folder):
    folder = tmp_path_factory.mktemp("composites") / request.param
    save_composite(folder, request.param, AutoTokenizer.from_pretrained(tokenizer_folder))
    return folder


def whole(folder):
    """The model with its tower, by the class that its config names."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()


def options_of(folder):
    return ModelOptions(path=str(folder), device="cpu", dtype="float32")


def test_only_the_language_model_is_loaded_and_its_logits_are_the_same_bits(folder):
    model, other = load_causal_lm(options_of(folder)), whole(folder)
    assert type(model) is type(other)
    wanted = {name: one for name, one in other.named_parameters() if is_text(name)}
    assert dict(model.named_parameters()).keys() == wanted.keys()
    assert unused_weights(options_of(folder)) == []
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, other(input_ids=IDS).logits)
    assert TreeScorer(model).path.head == "fused"


def test_a_plan_counts_only_the_language_model(folder):
    empty, model = empty_model(options_of(folder), "float32", None), whole(folder)
    counted = {name: one.shape for name, one in empty.named_parameters()}
    assert counted == {n: one.shape for n, one in model.named_parameters() if is_text(n)}


def test_an_adapter_names_no_layer_of_the_tower(folder, tmp_path):
    for targets in ([], ["q_proj", "layers.1.mlp.up_proj"]):
        lora = LoraOptions(enabled=True, targets=targets)
        policy = load_policy(options_of(folder), TRAIN, lora)
        own = {n: one for n, one in policy.model.state_dict().items() if "lora_" in n}
        save_adapter(policy.model, own, folder, tmp_path / "adapter")
        with quiet():
            adapted = PeftModel.from_pretrained(whole(folder), tmp_path / "adapter")
        names = {name for name, _ in adapted.named_parameters() if "lora_" in name}
        assert names == own.keys()
        assert all("language_model" in name for name in names)
        assert any("up_proj" in name for name in names)
        # It is trained further in the same shape.
        options = replace(options_of(folder), adapter=str(tmp_path / "adapter"))
        again = load_policy(options, TRAIN, LoraOptions(enabled=True)).model
        learning = {name: one for name, one in again.named_parameters() if one.requires_grad}
        assert learning.keys() == own.keys()
        assert all(torch.equal(one, own[name]) for name, one in learning.items())


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_a_text_class_that_a_config_names_is_used(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["Qwen3_5ForCausalLM"]}
    path.write_text(json.dumps(config))
    model = load_causal_lm(options_of(tmp_path / "model"))
    assert type(model).__name__ == "Qwen3_5ForCausalLM"


def test_a_model_with_an_encoder_is_refused(tmp_path):
    AutoConfig.for_model("florence2").save_pretrained(tmp_path)
    with refuses(UsageError, str(tmp_path / "config.json")):
        resolve(options_of(tmp_path))


def test_layers_that_predict_ahead_are_kept_in_a_model_of_text(tmp_path):
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "head_dim": 8}
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, **MOE}
    shared = {"shared_expert_intermediate_size": 16}
    config = AutoConfig.for_model("qwen3_next", **COMMON | heads | sizes | shared)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    ahead = {"mtp.fc.weight": torch.ones(2, 3, dtype=torch.bfloat16), "mtp.norm": torch.ones(5)}
    stored = load_file(file) | ahead
    save_file(stored, file, metadata={"format": "pt"})
    model = load_causal_lm(options_of(tmp_path / "model"))
    save_whole(model, model.state_dict(), tmp_path / "model", tmp_path / "saved")
    files = (tmp_path / "saved").glob("*.safetensors")
    saved = {name: one for path in files for name, one in load_file(path).items()}
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], one) for name, one in stored.items())
    load_causal_lm(options_of(tmp_path / "saved"))
