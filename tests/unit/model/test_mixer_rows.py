"""Hybrid models over trees: the rows that their recurrent layers see, and what learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from align.schemas.config import ModelOptions
from align.schemas.rows import Tree
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model.mixer_rows import mixer_rows
from align.stages.model.policy import load_policy
from align.stages.model.tree_attention import tree_batch
from support.families import (
    HYBRID_FAMILIES,
    drawn_adapter,
    learning_names,
    mixed_trees,
    tiny_model,
)

pytestmark = pytest.mark.numeric
CPU = torch.device("cpu")
TREES = tuple(mixed_trees())
# The layers before and after the recurrence, and the other layers.
ADAPTED = {
    "qwen3_5": {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj"},
    "qwen3_next": {"in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"},
    "olmo_hybrid": {"q_proj", "a_proj", "b_proj", "g_proj", "o_proj", "down_proj"},
    "lfm2": {"in_proj", "out_proj", "q_proj", "w1"},
    "nemotron_h": {"in_proj", "q_proj", "up_proj"},
    "granitemoehybrid": {"in_proj", "q_proj", "input_linear"},
}


@pytest.mark.parametrize("packed", [True, False])
def test_a_completion_is_in_a_row_behind_its_prompt_with_others_of_its_length(packed):
    def tree(prompt, *branches):
        ones = [np.ones(size, np.int32) for size in branches]
        return Tree(np.ones(prompt, np.int32), tuple(ones))

    batch = tree_batch([tree(2, 8, 1), tree(1, 3, 5)], CPU, packed=packed, length=24)
    rows = mixer_rows(batch)
    # Gap, prompt, completions; gap, prompt, completions; gap.
    assert rows.sizes == [0, 2, 8, 1, 0, 1, 3, 5, 4 if packed else 2]
    # 10 tokens and 6 of them; 4 and 3, which would be padded to more than twice their length.
    assert rows.groups == [[(1, 2), (5, 7)], [(5, 6), (1, 3)]]


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_an_adapter_learns_in_recurrent_layers_as_in_plain_rows(name, tmp_path):
    tiny_model(*HYBRID_FAMILIES[name]).save_pretrained(tmp_path)
    found = {}
    for how, layout in (("kept", "packed"), ("recomputed", "packed"), ("plain", "plain")):
        train = TrainOptions(dtype="float32", gradient_checkpointing=how == "recomputed")
        lora = LoraOptions(enabled=True)
        torch.manual_seed(0)
        policy = drawn_adapter(load_policy(ModelOptions(path=str(tmp_path)), train, lora))
        assert policy.path.layout == "packed"
        policy.path = replace(policy.path, layout=layout)
        logps = policy(TREES)[0]
        (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
        gradients = [one.grad for one in policy.parameters() if one.requires_grad]
        found[how] = [logps.detach(), *gradients]
    names = {one.split(".lora_")[0].rpartition(".")[2] for one in learning_names(policy)}
    assert ADAPTED[name] <= names
    assert ("out_proj" in names) == ("out_proj" in ADAPTED[name])  # Mamba's kernel skips an adapter
    assert all(map(torch.equal, found["recomputed"], found["kept"]))
    for packed, plain in zip(found["kept"], found["plain"], strict=True):
        assert plain.any()
        assert (packed - plain).abs().max() <= 1e-5 * plain.abs().max()
