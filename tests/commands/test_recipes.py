"""Recipes of `align init`: each is planned as it stands, on the card that it names."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from support.command import refusal, success
from support.rooms import ROOT

RECIPES = sorted((ROOT / "pipeline" / "options" / "recipes").glob("*.yaml"))
OF_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    dtype="bfloat16",
)
ADAPTER = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 1,
    "target_modules": ["q_proj"],
    "layers_to_transform": [0],
}
OF_LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_written_and_its_training_is_planned(recipe, tmp_path):
    success("init", "--recipe", recipe.stem)
    text = (tmp_path / "align.yaml").read_text(encoding="utf-8")
    assert text == recipe.read_text(encoding="utf-8")
    OF_8B.save_pretrained(tmp_path / re.search(r"^  path: (\S+)", text, re.MULTILINE)[1])
    if adapter := re.search(r"^  adapter: (\S+)", text, re.MULTILINE):
        (tmp_path / adapter[1]).mkdir()
        (tmp_path / adapter[1] / "adapter_config.json").write_text(json.dumps(ADAPTER))
        halves = {"lora_A": torch.zeros(1, 4096), "lora_B": torch.zeros(4096, 1)}
        tensors = {f"{OF_LAYER}.{name}.weight": half for name, half in halves.items()}
        save_file(tensors, tmp_path / adapter[1] / "adapter_model.safetensors")
    card = re.search(r"^#   align plan (--gpu .+?)(  |$)", text, re.MULTILINE)
    flags = card[1].split() if card else ["--gpu", "80g"]
    if "  method: " not in text:  # its sweep names one
        flags += ["--method", "dpo"]
    said = success("plan", "--rows", "10000", *flags).out
    if card:  # a recipe that names a card fits it
        assert said.startswith("Fits")


def test_a_recipe_that_there_is_not_lists_those_there_are():
    names = [path.stem for path in RECIPES]
    assert len(names) == 7
    Path("align.yaml").touch()  # it may be there already when a user asks
    refusal(2, "init", "--recipe", "list", names=["--recipe", *names])
    refusal(2, "init", "--recipe", names[0], "--method", "dpo", names=["--recipe", "--method"])
