"""A rank of a test world: tiny policies under DeepSpeed, beside themselves without it."""

import json

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from align.schemas.config import LoraOptions, TrainOptions
from align.schemas.rows import Tree
from align.stages.engine.deepspeed_compat import deepspeed
from align.stages.engine.deepspeed_engine import open_engine
from align.stages.model.load import ScalarHead, add_lora
from align.stages.model.policy import Policy
from support.adapters import drawn_adapter

VOCABULARY, WIDTH = 1500, 16  # more than one tile of the head
# Trees of each rank in each micro-batch; in one of them a rank has nothing to do.
MICRO_BATCHES = ((3, 0), (1, 2))
KINDS = {
    "untied, recomputing": {"checkpointing": True},
    "tied, adapted": {"tied": True, "lora": True},
    "tied, values, recomputing": {
        "tied": True,
        "head": "values",
        "purity": True,
        "checkpointing": True,
    },
    "adapted values": {"lora": True, "head": "values"},
    "scores": {"head": "score"},
    "adapted scores, recomputing": {"head": "score", "lora": True, "checkpointing": True},
}


def policy_of(*, tied=False, lora=False, checkpointing=False, head="none", purity=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=3,
        num_labels=1,
    )
    model = (LlamaForSequenceClassification if head == "score" else LlamaForCausalLM)(config)
    if head == "score":
        model.score.__class__ = ScalarHead
    if lora:
        model = drawn_adapter(add_lora(model, LoraOptions(rank=2), seed=3))
    policy = Policy(model, head=head, purity=purity)
    if head == "values":  # it begins at zero, and so would be what it gives the states
        torch.nn.init.normal_(policy.value_head.weight)
    if checkpointing:
        policy.recompute_activations()
    return policy


def trees_of(rank, micro):
    random = np.random.default_rng(10 * micro + rank)
    return tuple(
        Tree(draw(random), tuple(draw(random) for _ in range(1 + index)))
        for index in range(MICRO_BATCHES[micro][rank])
    )


def draw(random):
    return random.integers(0, VOCABULARY, random.integers(1, 9), "int32")


def alone(policy, size):
    """The gradient of the whole batch in one process."""
    parts = [trees_of(rank, micro) for micro in range(len(MICRO_BATCHES)) for rank in range(size)]
    for trees in parts:
        loss_of(dict(zip(policy.output_names, policy(trees), strict=True))).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}


def loss_of(outputs):
    """Of everything that has a gradient."""
    return sum(outputs[name].sum() for name in ("logps", "values") if name in outputs)


def compared(world, folder, kind, stage):
    policy = policy_of(**KINDS[kind])
    plain = policy_of(**KINDS[kind] | {"checkpointing": False})
    zero = {"stage": int(stage), "stage3_param_persistence_threshold": 0}
    config = folder / f"{kind}-{stage}.json"
    if world.rank == 0:
        config.write_text(json.dumps({"zero_optimization": zero}))
    torch.distributed.barrier()
    options = TrainOptions(dtype="float32", deepspeed=str(config))
    engine, _ = open_engine(policy, options, world, hidden_size=WIDTH)
    partitioned = sum(p.numel() for p in policy.parameters())
    same = []
    for micro in range(len(MICRO_BATCHES)):
        trees = trees_of(world.rank, micro)
        with torch.no_grad():
            engine.forward(trees)
        outputs = engine.forward(trees)
        assert tuple(outputs) == plain.output_names
        same.append(torch.equal(torch.stack(list(outputs.values())), plain(trees)))
        engine.backward(loss_of(outputs), is_last=micro == len(MICRO_BATCHES) - 1)
    expected = alone(plain, world.size)
    named = dict(policy.named_parameters())
    worst = 0.0
    for name, wanted in expected.items():
        found = deepspeed.utils.safe_get_full_grad(named[name])
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    return {
        "same_outputs": all(same),
        "worst": worst,
        "compared": len(expected),
        "local_elements": partitioned,
        "all_elements": sum(p.numel() for p in plain.parameters()),
        "restored": restored(world, engine, folder / f"{kind}-{stage}"),
    }


def restored(world, engine, folder):
    """Whether the step that is due moves all that learns, and a saved state brings it back."""
    if world.rank == 0:
        folder.mkdir()
    before = engine.weights(trainable_only=True)
    engine.total(torch.zeros(1, dtype=torch.float64))
    engine.save_state(folder)
    engine.set_lr(0.1)
    engine.step()
    moved = engine.weights(trainable_only=True)
    engine.load_state(folder)
    after = engine.weights(trainable_only=True)
    return [
        not any(torch.equal(moved[name], before[name]) for name in before),
        all(torch.equal(after[name], before[name]) for name in before),
    ]
