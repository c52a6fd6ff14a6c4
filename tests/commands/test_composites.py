"""Models that read images too: what a training writes holds all that its source held."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from align.pipeline.plan.workload import known_dtype
from align.schemas.config import ModelOptions
from align.stages.model.load import load_causal_lm
from align.stages.model.save import save_whole

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
        {},
    ),
}
PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
SHORT = ("--method", "dpo", "--batch-size", 8, "--max-steps", 2, "--lr", 1e-2, "--no-mlflow")
BEST = ("--set", "train.write_best=true", "--set", "train.best=loss", "--save-every", 1)


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


def save_packed(folder):
    """The folder of a gpt-oss whose experts are stored in MXFP4, as its publisher stores them."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = AutoConfig.for_model("gpt_oss", **sizes, **counts, **experts)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors, drawing = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = experts, outputs, inputs // 32
        drawn = torch.randint(256, (*blocks, 16), dtype=torch.uint8, generator=drawing)
        scales = torch.full(blocks, 120, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": drawn, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(settings))


def is_text(name):
    """Whether a tensor is of the part that reads text."""
    return "language_model" in name or "lm_head" in name


@pytest.fixture(scope="module")
def trained(server, world, tmp_path_factory):
    """Gives a family's folder, and what a full training and one of an adapter made of it."""
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)

    def train(family):
        folder = tmp_path_factory.mktemp(family)
        save_composite(folder / "model", family, tokenizer)
        made = ("--model", folder / "model", "--output", folder / "cache", "--no-mlflow")
        server.success("precompute-ref", world.data.paired, *made)
        of_cache = ("train", "--cache", folder / "cache", *SHORT)
        runs = [
            server.start(*of_cache, "--output", folder / name, *more)
            for name, more in (
                ("full", BEST),
                ("lora", ("--lora", "--merge")),
                ("scorer", ("--method", "reward")),
            )
        ]
        for run in runs:
            (answer,) = run.answers()
            assert answer.code == 0, answer
        return folder

    return train


def tensors_of(folder):
    """Every tensor of a model's folder by name; none lies in two files, and none beside them."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in {*index.values()}}
    assert {path.name for path in folder.glob("*.safetensors")} == {*files}
    assert {(one, name) for name in files for one in files[name]} == {*index.items()}
    return {one: files[name][one] for one, name in index.items()}


def require_whole(folder):
    """Requires that the class its config names loads all of a folder, and nothing else."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    kind = getattr(transformers, name)
    _, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_a_saved_folder_holds_every_tensor_and_file_of_its_source(trained, family):
    folder = trained(family)
    source = folder / "model"
    before = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    for saved in (folder / "full" / "model", folder / "lora" / "model-merged"):
        after = tensors_of(saved)
        assert after.keys() == before.keys()
        same = {name for name in before if before[name].dtype == after[name].dtype}
        same = {name for name in same if torch.equal(before[name], after[name])}
        assert {name for name in before if not is_text(name)} <= same
        assert any(is_text(name) for name in before.keys() - same)
        for name in (*PROCESSORS, "tokenizer.json"):
            assert (saved / name).read_bytes() == (source / name).read_bytes()
        assert json.loads((saved / "config.json").read_text()) == config
        require_whole(saved)
    scorer = folder / "scorer" / "model"
    heads = {name for name in before if "lm_head" in name}
    assert tensors_of(scorer).keys() == before.keys() - heads | {"score.weight"}
    require_whole(scorer)
    adapter = {path.name for path in (folder / "lora" / "model").glob("*.safetensors")}
    assert adapter == {"adapter_model.safetensors"}


def test_weights_that_were_unpacked_are_saved_as_plain_ones(tmp_path):
    save_packed(tmp_path / "model")
    model = load_causal_lm(ModelOptions(path=str(tmp_path / "model")))
    save_whole(model, model.state_dict(), tmp_path / "model", tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    require_whole(tmp_path / "saved")


def test_the_dtype_of_a_folder_without_weights_may_stand_in_its_text_part(tmp_path):
    config = {"text_config": {"dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert known_dtype(str(tmp_path), "auto") == "bfloat16"


def test_a_family_that_is_not_read_as_text_is_refused_in_one_message(server, world, tmp_path):
    save_composite(tmp_path / "model", "mistral3", AutoTokenizer.from_pretrained(world.tokenizer))
    asked = ("precompute-ref", world.data.paired, "--model", tmp_path / "model", "--no-mlflow")
    answer = server.run(*asked, "--output", tmp_path / "cache")
    assert answer.code == 2, answer
    assert str(tmp_path / "model" / "config.json") in answer.err
    assert "Traceback" not in answer.err
