"""A rank of a test world: loads policies for ZeRO-3 in every way."""

import hashlib

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from align.schemas.config import ModelOptions
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.engine.deepspeed_config import EngineContext
from align.stages.engine.deepspeed_engine import open_engine
from align.stages.engine.zero3_partitions import open_partitions
from align.stages.model.loading.load import resolve
from align.stages.model.loading.quiet import quiet
from align.stages.model.loading.sharded_load import load_sharded
from align.stages.model.policy import Sharding, load_policy
from support.families import COMMON, TREE_FAMILIES, drawn_adapter, tiny_model
from support.forked_ranks import device_of_ranks
from support.live_bytes import LiveBytes
from support.tiny_policy import some_trees

PRESET = {"deepspeed": "zero3", "weight_decay": 0.1, "lr": 1e-3, "max_grad_norm": 0.5}
TINY = COMMON | {"initializer_range": 0.2}
LARGE = TINY | {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 352}
# The folder of each, and how it is loaded: float32 is also read from what lies there in bfloat16.
KINDS = {
    "values": ("tied", {"head": "values"}),
    "adapted, bfloat16": ("causal", {"adapted": True, "dtype": "bfloat16"}),
    "new scores": ("causal", {"head": "score", "adapted": True}),
    "lora on scores": ("scores", {"head": "score", "lora": True}),
    "experts": ("experts", {}),  # stored one by one, and merged as they are read
}


def partitions_of(options, train, world):
    found = resolve(options)
    return open_partitions(train, world, EngineContext(found.dtype, found.hidden_size, world.size))


def counted(world, folder):
    """Bytes that this rank holds at once while it loads, stored in float32 and computed so."""
    train = TrainOptions(dtype="float32", **PRESET)
    path = str(folder / "models" / "large")
    options = ModelOptions(path=path, device="cpu", dtype="float32")
    partitions = partitions_of(options, train, world)
    with LiveBytes() as live:
        model = load_sharded(options, partitions=partitions)
    parameters = list(model.parameters())
    return {
        "most": live.most,
        "buffers": sum(one.nbytes for one in model.buffers()),
        "kept": sum(one.ds_tensor.nbytes for one in parameters),
        "largest": max(4 * one.ds_numel for one in parameters),
        "all": sum(4 * one.ds_numel for one in parameters),
    }


def loaded(world, folder, kind):
    """The first step of a policy of which every rank has loaded its part, or the whole."""
    return {way: first_step(world, folder, kind, way=way) for way in ("spread", "whole")}


def first_step(world, folder, kind, *, way):
    path, how = KINDS[kind]
    dtype, head = how.get("dtype", "float32"), how.get("head", "none")
    train = TrainOptions(dtype=dtype, **PRESET)
    adapter = str(folder / "models" / "adapter") if how.get("adapted") else ""
    path = str(folder / "models" / path)
    options = ModelOptions(path=path, adapter=adapter, device=device_of_ranks(), dtype=dtype)
    spread = Sharding(partitions_of(options, train, world) if way == "spread" else None)
    lora = LoraOptions(enabled=how.get("lora", False), rank=2)
    policy = load_policy(options, train, lora, head=head, purity=head == "values", spread=spread)
    held = sum(p.numel() for p in policy.model.parameters())
    hidden = policy.model.config.hidden_size
    engine, _ = open_engine(policy, train, world, hidden_size=hidden)
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


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def make_models(folder):
    """The models that are loaded, and an adapter for one of them."""
    saved(folder / "large", **LARGE)
    saved(folder / "tied", tie_word_embeddings=True, **TINY)
    tiny_model(*TREE_FAMILIES["mixtral"]).save_pretrained(folder / "experts")
    saved(folder / "causal", dtype=torch.bfloat16, **TINY)
    saved(folder / "scores", LlamaForSequenceClassification, num_labels=1, **TINY)
    torch.manual_seed(1)
    settings = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    with quiet():
        model = get_peft_model(LlamaForCausalLM.from_pretrained(folder / "causal"), settings)
    drawn_adapter(model).save_pretrained(folder / "adapter")


def saved(folder, kind=LlamaForCausalLM, dtype=torch.float32, **settings):
    """A model in several files."""
    torch.manual_seed(0)
    kind(LlamaConfig(**settings)).to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return folder
