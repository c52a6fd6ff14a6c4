"""Models that read images too: what a training writes holds all that its source held."""

import json

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from align.pipeline.plan.workload import known_dtype
from align.schemas.config import ModelOptions
from align.stages.model.load import load_causal_lm
from align.stages.model.reward_model import load_reward_model
from align.stages.model.save import save_whole
from align.stages.model.transformers_compat import quiet
from align.stages.storage.tables import TableFolder, read_table
from support.composites import PROCESSORS, is_text, save_composite
from support.trainings import KILLED

SHORT = ("--batch-size", 8, "--max-steps", 2, "--lr", 1e-2, "--no-mlflow", "--save-every", 1)
BEST = ("--set", "train.write_best=true", "--set", "train.best=loss")
# Of each family: its trainings. transformers has no class of Mistral 3 that scores texts.
RUNS = {
    "gemma3": {
        "full": ("--method", "dpo", *BEST),
        "lora": ("--method", "kto", "--lora", "--merge"),
        "scorer": ("--method", "reward"),
    },
    "qwen3_5": {
        "full": ("--method", "kto", "--deepspeed", "zero3"),
        "lora": ("--method", "orpo", "--lora", "--merge"),
        "scorer": ("--method", "reward"),
    },
    "mistral3": {
        "full": ("--method", "orpo", "--deepspeed", "zero3"),
        "lora": ("--method", "dpo", "--lora", "--merge", "--set", "train.memory=8GiB"),
    },
}


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


@pytest.fixture(scope="module", params=RUNS)
def trained(request, server, world, tmp_path_factory):
    """A family's folder, and those of its trainings: of all weights, of an adapter, of scores."""
    folder = tmp_path_factory.mktemp(request.param)
    save_composite(folder / "model", request.param, AutoTokenizer.from_pretrained(world.tokenizer))
    made = ("--model", folder / "model", "--output", folder / "cache", "--no-mlflow")
    server.success("precompute-ref", world.data.paired, *made)
    finish(server, *(training(folder, *run) for run in RUNS[request.param].items()))
    return folder


def training(folder, name, words, **how):
    """The command of a training with the cache of a folder, and how it is started."""
    given = ("--cache", folder / "cache", "--output", folder / name, *SHORT, *words)
    return ("train", *given), how


def finish(server, *commands, code=0):
    """Runs commands at the same time; each ends with this code."""
    for run in [server.start(*words, **how) for words, how in commands]:
        (answer,) = run.answers()
        assert answer.code == code, answer


def tensors_of(folder):
    """Every tensor of a model's folder by name; none lies in two files, and none beside them."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in {*index.values()}}
    assert {path.name for path in folder.glob("*.safetensors")} == {*files}
    assert {(one, name) for name in files for one in files[name]} == {*index.items()}
    return {one: files[name][one] for one, name in index.items()}


def whole(folder):
    """The model of the class that a config names, which loads all of a folder and nothing else."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    kind = getattr(transformers, name)
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


def test_a_saved_folder_holds_every_tensor_and_file_of_its_source(trained):
    source = trained / "model"
    before = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    for saved in (trained / "full" / "model", trained / "lora" / "model-merged"):
        after = tensors_of(saved)
        assert after.keys() == before.keys()
        same = {name for name in before if before[name].dtype == after[name].dtype}
        same = {name for name in same if torch.equal(before[name], after[name])}
        assert {name for name in before if not is_text(name)} <= same
        assert any(is_text(name) for name in before.keys() - same)
        for name in (*PROCESSORS, "tokenizer.json"):
            assert (saved / name).read_bytes() == (source / name).read_bytes()
        assert json.loads((saved / "config.json").read_text()) == config
        whole(saved)
    adapter = {path.name for path in (trained / "lora" / "model").glob("*.safetensors")}
    assert adapter == {"adapter_model.safetensors"}
    if (scorer := trained / "scorer" / "model").exists():
        heads = {name for name in before if "lm_head" in name}
        assert tensors_of(scorer).keys() == before.keys() - heads | {"score.weight"}
        whole(scorer)
        scored = load_reward_model(ModelOptions(path=str(scorer)), seed=0)
        names = {name for name, _ in scored.named_parameters() if not is_text(name)}
        assert names == {"score.weight"}


def test_an_adapter_fits_the_model_that_reads_images_and_gives_what_was_merged(trained):
    merged = whole(trained / "lora" / "model-merged").eval()
    plain, stored = whole(trained / "model"), trained / "lora" / "model"
    with quiet():
        adapted = PeftModel.from_pretrained(plain, stored).eval()
    names = {name.replace(".default", "") for name in adapted.state_dict() if "lora_" in name}
    assert names == load_file(stored / "adapter_model.safetensors").keys()
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        expected = merged(input_ids=ids).logits
        assert torch.allclose(adapted(input_ids=ids).logits, expected, atol=1e-5)
        assert not torch.allclose(adapted.unload()(input_ids=ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize("trained", ["qwen3_5"], indirect=True)
def test_a_killed_training_resumes_with_the_same_bits(trained, server):
    words = (*RUNS["qwen3_5"]["full"], "--resume", "auto")
    kill = training(trained, "killed", words, faults=["before:update=kill@2"])
    finish(server, kill, code=KILLED)
    finish(server, training(trained, "killed", words))
    found, expected = (tensors_of(trained / run / "model") for run in ("killed", "full"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_trained_model_answers_prompts(trained, server, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is one and one?"}\n')
    models = {
        "full": ("--model", trained / "full" / "model"),
        "lora": ("--model", trained / "model", "--adapter", trained / "lora" / "model"),
    }
    for name, model in models.items():
        given = (*model, "--output", tmp_path / name, "-n", 2, "--max-new-tokens", 4)
        server.success("sample", prompts, *given, "--no-mlflow")
        assert len(read_table(TableFolder(tmp_path / name, "samples"))[1]) == 2


def test_weights_that_were_unpacked_are_saved_as_plain_ones(tmp_path):
    save_packed(tmp_path / "model")
    model = load_causal_lm(ModelOptions(path=str(tmp_path / "model")))
    save_whole(model, model.state_dict(), tmp_path / "model", tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    whole(tmp_path / "saved")


def test_the_dtype_of_a_folder_without_weights_may_stand_in_its_text_part(tmp_path):
    config = {"text_config": {"dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert known_dtype(str(tmp_path), "auto") == "bfloat16"
