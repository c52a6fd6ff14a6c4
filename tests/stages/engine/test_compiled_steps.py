"""Steps of a policy with compiled layers beside those of its own layers, under ZeRO 0 to 2."""

from dataclasses import replace

import torch

from align.stages.engine.deepspeed_engine import open_engine
from align.stages.model.compiled_layers import compile_layers
from align.stages.model.policy import Policy
from support.branch_by_branch import num_tokens
from support.compilations import Compilations, compilations
from support.engine_ranks import OPTIONS
from support.families import COMMON, TREE_FAMILIES, drawn_trees, tiny_model

STEPS = [
    [drawn_trees(2 * step + part, tokens=200, longest=30) for part in (0, 1)] for step in (0, 1)
]


def test_they_learn_the_same_and_zero_compiles_nothing_anew(one_rank):
    with compilations() as compiled:
        for preset in ("zero0", "zero1", "zero2"):
            updates, weights = learned(one_rank, preset, is_compiled=True)
            assert compiled.look() == Compilations(graphs=1)  # of the first engine
            others, expected = learned(one_rank, preset, is_compiled=False)
            assert updates == others
            for name, tensor in weights.items():
                assert torch.equal(tensor, expected[name]), name


def learned(world, preset, *, is_compiled):
    """The norms of the gradients of each step, and the weights after them."""
    policy = Policy(tiny_model(*TREE_FAMILIES["llama"]))
    policy.path = replace(policy.path, layout="tree")
    if is_compiled:
        compile_layers(policy.model, "eager")
    options = replace(OPTIONS, dtype="float32", deepspeed=preset)
    engine, _ = open_engine(policy, options, world, hidden_size=COMMON["hidden_size"])
    updates = []
    for step in STEPS:
        engine.set_lr(1e-3)
        tokens = sum(map(num_tokens, step))
        for index, trees in enumerate(step):
            engine.learn_mode(dropout_seed=index)
            loss = -engine.forward(trees)["logps"].double().sum() / tokens
            engine.backward(loss, is_last=index == len(step) - 1)
        update = engine.step()
        assert update.applied
        updates.append(update.grad_norm)
    return updates, engine.weights()
