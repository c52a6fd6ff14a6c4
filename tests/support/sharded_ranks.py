"""A rank of a test world loads policies for ZeRO-3 in every way."""

import hashlib
import json
import shutil
from functools import partial

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.engine.deepspeed_config import EngineContext, loading_config
from align.stages.engine.deepspeed_engine import open_engine
from align.stages.engine.distributed import agreed, run_on_all_ranks
from align.stages.model.load import load_model, resolve
from align.stages.model.policy import load_policy
from align.stages.model.sharded_load import load_sharded
from align.stages.model.transformers_compat import quiet
from support.families import COMMON, TREE_FAMILIES, drawn_adapter, tiny_model
from support.forked_ranks import device_of_ranks
from support.live_bytes import LiveBytes
from support.tiny_policy import some_trees

PRESET = {"deepspeed": "zero3", "weight_decay": 0.1, "lr": 1e-3, "max_grad_norm": 0.5}
TINY = COMMON | {"initializer_range": 0.2}
DAMAGED = {
    "unused": {"model.surplus": torch.ones(7)},
    "another shape": {"model.norm.weight": torch.ones(7)},
}
LARGE = TINY | {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 352}
# The folder of each, and how it is loaded; bfloat16 weights are loaded as float32 too.
KINDS = {
    "values": ("tied", {"head": "values"}),
    "adapted, bfloat16": ("causal", {"adapted": True, "dtype": "bfloat16"}),
    "continued, bfloat16": ("causal", {"adapted": True, "lora": True, "dtype": "bfloat16"}),
    "new scores": ("causal", {"head": "score", "adapted": True}),
    "lora on scores": ("scores", {"head": "score", "lora": True}),
    "experts": ("experts", {}),  # stored one by one, and merged as they are read
    "heads that differ": ("untied", {}),
}


def loader_of(options, train, world):
    """A function that loads a folder in parts on these ranks."""
    found = resolve(options)
    context = EngineContext(found.dtype, found.hidden_size, world.size)
    config = loading_config(train, world, context)
    return partial(load_sharded, config=config, together=partial(run_on_all_ranks, world))


def counted(world, folder):
    """The peak in bytes of this rank while it loads a float32 model."""
    train = TrainOptions(dtype="float32", **PRESET)
    path = str(folder / "models" / "large")
    options = ModelOptions(path=path, device="cpu", dtype="float32")
    load = loader_of(options, train, world)
    with LiveBytes() as live:
        model = load(options)
    parameters = list(model.parameters())
    return {
        "most": live.most,
        "kept": sum(one.ds_tensor.nbytes for one in parameters),
        "largest": max(4 * one.ds_numel for one in parameters),
        "all": sum(4 * one.ds_numel for one in parameters),
    }


def loaded(world, folder, kind):
    """The first step of a policy that ranks loaded in parts, and of one loaded whole."""
    return {way: first_step(world, folder, kind, way=way) for way in ("sharded", "whole")}


def first_step(world, folder, kind, *, way):
    path, how = KINDS[kind]
    dtype, head = how.get("dtype", "float32"), how.get("head", "none")
    train = TrainOptions(dtype=dtype, **PRESET)
    adapter = str(folder / "models" / "adapter") if how.get("adapted") else ""
    path = str(folder / "models" / path)
    options = ModelOptions(path=path, adapter=adapter, device=device_of_ranks(), dtype=dtype)
    load = loader_of(options, train, world) if way == "sharded" else load_model
    lora = LoraOptions(enabled=how.get("lora", False), rank=2)
    policy = load_policy(
        options, train, lora, head=head, collision_logps=head == "values", load=load
    )
    held = sum(p.numel() for p in policy.model.parameters())
    hidden = policy.model.config.hidden_size
    engine, _ = open_engine(policy, train, world, hidden_size=hidden)
    if policy.is_sharded:
        policy.choose_path(partial(agreed, world))
    trees = tuple(some_trees(np.random.default_rng(world.rank), 3 - world.rank))
    engine.learn_mode(dropout_seed=1)
    outputs = engine.forward(trees)
    engine.backward(sum(values.double().sum() for values in outputs.values()), is_last=True)
    update = engine.step()
    return {
        "whole_elements": held,
        "outputs": {name: values.tolist() for name, values in outputs.items()},
        "norm": update.grad_norm,
        "weights": {name: digest(tensor) for name, tensor in engine.weights().items()},
        "path": [policy.path.layout, policy.path.head],
    }


def refused(world, folder, kind):
    """The error of each rank; only the last one has a damaged folder."""
    whole, damaged = (folder / "models" / name for name in ("causal", kind))
    train = TrainOptions(dtype="float32", **PRESET)
    path = damaged if world.rank == world.size - 1 else whole
    options = ModelOptions(path=str(path), device=device_of_ranks(), dtype="float32")
    try:
        loader_of(options, train, world)(options)
    except UsageError as error:
        return str(error)
    return ""


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def make_models(folder):
    """Makes the models, and an adapter for one of them."""
    saved(folder / "large", **LARGE)
    saved(folder / "tied", tie_word_embeddings=True, **TINY)
    saved(folder / "untied", **TINY)
    config = json.loads((folder / "untied" / "config.json").read_text())
    tied = json.dumps(config | {"tie_word_embeddings": True})
    (folder / "untied" / "config.json").write_text(tied)
    tiny_model(*TREE_FAMILIES["mixtral"]).save_pretrained(folder / "experts")
    saved(folder / "causal", dtype=torch.bfloat16, size="1GB", **TINY)
    saved(folder / "scores", LlamaForSequenceClassification, num_labels=1, **TINY)
    for name, change in DAMAGED.items():
        shutil.copytree(folder / "causal", folder / name)
        file = folder / name / "model.safetensors"
        changed = load_file(file) | change
        save_file(changed, file, metadata={"format": "pt"})
    torch.manual_seed(1)
    settings = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    with quiet():
        model = get_peft_model(LlamaForCausalLM.from_pretrained(folder / "causal"), settings)
    drawn_adapter(model).save_pretrained(folder / "adapter")


def saved(folder, kind=LlamaForCausalLM, dtype=torch.float32, size="20KB", **settings):
    """A model in several files."""
    torch.manual_seed(0)
    kind(LlamaConfig(**settings)).to(dtype).save_pretrained(folder, max_shard_size=size)
    return folder
