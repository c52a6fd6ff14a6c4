"""Tiny models that read images beside text, as their folders look."""

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
}
# Of each family: its class, the settings of its text, those of its images, and its own.
COMPOSITES = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        VISION,
        {"mm_tokens_per_image": 4},
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        GATED_DELTA,
        {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
        {},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral"},
        {"model_type": "pixtral", "head_dim": 8, **VISION},
        {"tie_word_embeddings": False},
    ),
}
PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def save_composite(folder, family, tokenizer):
    """The folder of a drawn model, its images' weights in bfloat16; Qwen's predicts ahead too."""
    kind, text, vision, own = COMPOSITES[family]
    tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    common = {
        "vocab_size": len(tokenizer) + 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    own = {"image_token_id": len(tokenizer), "image_token_index": len(tokenizer), **own}
    config = AutoConfig.for_model(
        family, text_config={**common, **tokens, **text}, vision_config=vision, **own
    )
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors[name].bfloat16() for name in tensors if not is_text(name)}
    if family == "qwen3_5":
        tensors["mtp.norm.weight"] = torch.ones(32, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    for name in PROCESSORS:
        (folder / name).write_text(f'{{"of": "{name}"}}')


def is_text(name):
    """Whether a tensor is of the part that reads text."""
    return "language_model" in name or "lm_head" in name
