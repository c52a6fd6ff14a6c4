"""Every family the README names, compared with its own logits, one row and one branch at a time."""

import logging
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from align.schemas.rows import Tree
from align.stages.model import pieces
from align.stages.model.probe import PATHS
from align.stages.model.reference import TreeScorer

VOCABULARY = 97
WINDOW = 8
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

TREE_FAMILIES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, **SLIDING}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, "final_logit_softcapping": 5.0, **SLIDING}),
    "gemma3": ("gemma3_text", {"head_dim": 8, **SLIDING}),
    "gpt_oss": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, **SLIDING}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": WINDOW}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3 with a window": ("phi3", {"sliding_window": WINDOW}),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", {}),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 8}),
    "falcon": ("falcon", {"alibi": False}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"logits_scaling": 4.0}),
    "stablelm": ("stablelm", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}
# Eager only, or with an attention that takes no further arguments.
UNPACKED = {"gemma2", "gpt_oss", "gptj", "falcon", "stablelm"}
PLAIN_FAMILIES = {
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "mamba": ("mamba", {"state_size": 8}),
    "falcon with alibi": ("falcon", {"alibi": True}),
    "gpt_neo with local layers": (
        "gpt_neo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "window_size": WINDOW,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
}


@pytest.mark.parametrize("name", TREE_FAMILIES)
def test_a_tree_scores_like_each_branch_on_its_own(name, caplog):
    model = tiny_model(*TREE_FAMILIES[name])
    scorer = TreeScorer(deepcopy(model))
    layout = "tree" if name in UNPACKED else "packed"
    assert (scorer.path.layout, scorer.path.head) == (layout, "fused"), caplog.text
    assert not ours(caplog)
    assert worst_sequence(scorer, model) < 1e-4


@pytest.mark.parametrize("name", PLAIN_FAMILIES)
def test_a_family_without_trees_falls_back_and_says_so(name, caplog):
    model = tiny_model(*PLAIN_FAMILIES[name])
    scorer = TreeScorer(deepcopy(model))
    assert scorer.path.layout == "plain"
    (record,) = ours(caplog)
    assert record.levelno == logging.WARNING
    assert "tree rows with the fused head" in record.getMessage()
    assert worst_sequence(scorer, model) < 1e-4


@pytest.mark.parametrize("name", TREE_FAMILIES)
def test_padded_trees_with_a_dense_mask_score_the_same(name, monkeypatch):
    without_packing = tuple(path for path in PATHS if path.layout != "packed")
    monkeypatch.setattr("align.stages.model.probe.PATHS", without_packing)
    model = tiny_model(*TREE_FAMILIES[name])
    scorer = TreeScorer(deepcopy(model))
    assert (scorer.path.layout, scorer.path.head) == ("tree", "fused")
    assert worst_sequence(scorer, model) < 1e-4


def test_a_model_set_to_packed_trees_refuses_other_batches():
    model = tiny_model("llama", {})
    assert TreeScorer(model).path.layout == "packed"
    with pytest.raises(ValueError, match="was not told where they lie"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_tree_and_the_fused_head(dtype):
    scorer = TreeScorer(tiny_model("llama", {"initializer_range": 0.1}).to(dtype))
    assert (scorer.path.layout, scorer.path.head) == ("packed", "fused")
    assert 0 < scorer.path.worst_difference < 0.1


def test_a_window_cut_by_index_instead_of_position_would_be_noticed(monkeypatch, caplog):
    monkeypatch.setattr(
        "align.stages.model.masks._within", lambda batch, window: torch.tensor(True)
    )
    scorer = TreeScorer(tiny_model("mistral", {"sliding_window": WINDOW}, "eager"))
    assert scorer.path.layout == "plain"
    assert "off by" in caplog.text


def test_a_packed_batch_without_its_window_would_be_noticed(monkeypatch):
    template = pieces._template
    monkeypatch.setattr(pieces, "_template", lambda prompt, rows, _: template(prompt, rows, None))
    scorer = TreeScorer(tiny_model("mistral", {"sliding_window": WINDOW}))
    assert scorer.path.layout == "tree"


def test_a_head_that_the_spec_misses_falls_back_to_the_models_logits(caplog):
    model = tiny_model("llama", {})
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * 3)
    scorer = TreeScorer(deepcopy(model))
    assert (scorer.path.layout, scorer.path.head) == ("tree", "exact")
    assert "fused head: off by" in caplog.text
    assert worst_sequence(scorer, model) < 1e-4


def ours(caplog):
    return [record for record in caplog.records if record.name == "align"]


def tiny_model(model_type, settings, attention=None):
    torch.manual_seed(0)
    # Several families rename or lack some of the common settings; unknown ones are harmless.
    config = AutoConfig.for_model(model_type, **{**COMMON, **settings})
    chosen = {"attn_implementation": attention} if attention else {}
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen).eval()


def worst_sequence(scorer, model):
    trees = mixed_trees()
    logps = scorer.score(trees)
    assert logps.dtype == np.float32
    sums, start = [], 0
    for tree in trees:
        for branch in tree.branches:
            sums.append(logps[start : start + len(branch)].astype(np.float64).sum())
            start += len(branch)
    assert start == len(logps)
    expected = [oracle(model, tree.prompt, branch) for tree in trees for branch in tree.branches]
    return np.abs(np.array(sums) - np.array(expected)).max()


def mixed_trees():
    """Rows of different sizes: a prompt of 1, branches of 1, several times the window."""
    random = np.random.default_rng(3)
    shapes = [(30, (12, 1, 25)), (1, (1, 6)), (5, (40,)), (13, (9, 9, 2, 4)), (20, (1,))]
    return [
        Tree(draw(random, prompt), tuple(draw(random, size) for size in sizes))
        for prompt, sizes in shapes
    ]


def draw(random, size):
    return random.integers(3, VOCABULARY, size).astype(np.int32)


def oracle(model, prompt, branch):
    tokens = torch.from_numpy(np.concatenate([prompt, branch]).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0].double()
    logps = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return logps.gather(1, tokens[len(prompt) :, None]).sum().item()
