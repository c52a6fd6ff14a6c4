"""A tiny model of every family the README names, and rows to score with it."""

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from align.schemas.config import ModelOptions
from align.schemas.rows import Tree
from align.stages.model.load import load_causal_lm
from align.stages.model.transformers_compat import quiet

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
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **SLIDING},
    ),
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
    "qwen3_moe": ("qwen3_moe", {**MOE, "head_dim": 8}),
    "olmoe": ("olmoe", MOE),
    "granitemoe": ("granitemoe", {"num_local_experts": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}
# Of 4 experts, 2 for each token.
MIXTURES = {
    name: TREE_FAMILIES[name]
    for name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe")
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
# Layers that carry a state from token to token, beside attention: convolutions, delta rules, scans.
DELTA = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
HYBRID_FAMILIES = {
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_next": ("qwen3_next", {**DELTA, **MOE, "shared_expert_intermediate_size": 16}),
    "olmo_hybrid": ("olmo_hybrid", {**DELTA, "linear_num_key_heads": 4}),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "head_dim": 8,
            "layers_block_type": ["mamba", "mlp", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
        },
    ),
}
# It forgets its state if a text goes on in a second pass of several tokens.
FORGETFUL = (
    "jamba",
    {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8},
)


def tiny_model(model_type, settings, attention=None):
    torch.manual_seed(0)
    # Several families rename or lack some of the common settings; unknown ones are harmless.
    config = AutoConfig.for_model(model_type, **{**COMMON, **settings})
    chosen = {"attn_implementation": attention} if attention else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen).eval()
    for name, parameter in model.named_parameters():
        # States that last, and convolutions that mix, so that a token that leaks is seen.
        if name.endswith("A_log"):
            parameter.data.uniform_(0.5, 2.0).log_()
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            parameter.data.fill_(-3.0)
        elif ".conv" in name and parameter.ndim == 3:
            parameter.data.normal_(std=0.5)
    return model


def mixed_trees():
    """Rows of different sizes: a prompt of 1, branches of 1, several times the window."""
    random = np.random.default_rng(3)
    shapes = [(30, (12, 1, 25)), (1, (1, 6)), (5, (40,)), (13, (9, 9, 2, 4)), (20, (1,))]
    return [
        Tree(draw(random, prompt), tuple(draw(random, size) for size in sizes))
        for prompt, sizes in shapes
    ]


def drawn_trees(seed, *, tokens, longest=200):
    """Trees with prompts and branches of 1 to `longest` tokens, up to `tokens` in all."""
    random, trees = np.random.default_rng(seed), []
    while True:
        prompt, *branches = random.integers(1, longest + 1, random.integers(2, 5))
        if trees and sum(tree.num_tokens for tree in trees) + prompt + sum(branches) > tokens:
            return trees
        trees.append(Tree(draw(random, prompt), tuple(draw(random, size) for size in branches)))


def draw(random, size):
    return random.integers(3, VOCABULARY, size).astype(np.int32)


def learning_names(policy):
    """The names of the trainable parameters in the model of a policy."""
    named = policy.model.named_parameters()
    return [name for name, parameter in named if parameter.requires_grad]


def saved_adapter(folder, base, *, how=None, **settings):
    """Saves an adapter of a model's folder with peft; `how` are arguments of the saving."""
    torch.manual_seed(1)
    drawn = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False} | settings
    with quiet():
        model = load_causal_lm(ModelOptions(path=str(base)))
        get_peft_model(model, LoraConfig(**drawn)).save_pretrained(folder, **(how or {}))
    return folder


def drawn_adapter(model):
    """Draws the second matrices, which start at zero and would make the first gradients zero."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model
