"""Kernels that only a GPU has, beside what a CPU, padded trees or plain layers compute."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from align.schemas.config import ModelOptions
from align.schemas.rows import Tree
from align.stages.model.keyed_noise import stream_of, uniforms
from align.stages.model.policy import Policy, turn_dropout_off
from align.stages.model.reference import HfReference
from align.stages.train.step import partial_router_loss
from support.branch_by_branch import slopes_of
from support.families import MIXTURES, SLIDING, TREE_FAMILIES, drawn_trees, mixed_trees, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.numeric,
    pytest.mark.filterwarnings("default"),  # the compiler has advice for other programs
]

# The kernels take heads of at least 16 elements.
WIDE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 4096, "n_embd": 128}
# Windows are longer and shorter than a block.
FAMILIES = {
    "llama": {},
    "qwen2 with windows": {**SLIDING, "sliding_window": 40},
    "qwen3": {"head_dim": 128},
    "gemma": {"head_dim": 256},
    "gemma2": {**SLIDING, "sliding_window": 150, "attn_logit_softcapping": 2.0},
    "gemma3": {**SLIDING, "sliding_window": 150},
    "mistral with a window": {"sliding_window": 150},
    "phi": {},
    "gpt2": {"n_positions": 4096},
    "gpt_oss": {**SLIDING, "sliding_window": 150},
}
# float32: of rounding alone. bfloat16: both ways round what they add up, each in its own order.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def drawn_model(family, device, dtype, **more):
    kind, settings = TREE_FAMILIES[family]
    drawn = {"initializer_range": 0.1, **settings, **WIDE, **more}
    # Older versions of transformers let sdpa leave out the cap.
    attention = "eager" if "attn_logit_softcapping" in drawn else None
    model = tiny_model(kind, drawn, attention).to(device, dtype)
    turn_dropout_off(model)
    return model


def learned(policy, trees):
    """Log-probs of a step, and the gradient of each weight."""
    policy.zero_grad()
    logps = policy(trees)[0]
    (logps * slopes_of(len(logps)).to(logps.device)).sum().backward()
    gradients = [one.grad.flatten().float() for one in policy.parameters() if one.requires_grad]
    return [logps.detach().float(), *gradients]


def require_near(found, expected, allowed):
    for some, others in zip(found, expected, strict=True):
        assert float((some - others).norm() / others.norm()) < allowed


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("family", FAMILIES)
def test_flex_attention_computes_what_padded_trees_do(device, family, dtype):
    trees = tuple(drawn_trees(0, tokens=1500, longest=300))
    policy = Policy(drawn_model(family, device, dtype, **FAMILIES[family]))
    assert policy.path.layout == "flex"
    seen = []
    for layout in ("flex", "tree"):
        policy.path = replace(policy.path, layout=layout)
        logps, *gradients = learned(policy, trees)
        seen.append((logps, torch.cat(gradients)))
    require_near(*seen, ALLOWED[dtype])


def routed(name, device, dtype):
    kind, settings = MIXTURES[name]
    wide = {**WIDE, "moe_intermediate_size": 64, "initializer_range": 0.1}
    model = tiny_model(kind, settings | wide).to(device, dtype)
    turn_dropout_off(model)
    policy = Policy(model, balanced=True)
    logps, routing = policy(mixed_trees())
    (logps.double().sum() / 100 + partial_router_loss(routing, routing.detach())).backward()
    gradients = [one.grad.flatten() for one in policy.parameters() if one.grad is not None]
    return [one.detach().double().cpu() for one in (logps, routing, torch.cat(gradients))]


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("name", [name for name in MIXTURES if name != "granitemoe"])
def test_experts_are_routed_and_learn_as_on_a_cpu(device, name, dtype):
    allowed = {torch.float32: 1e-3, torch.bfloat16: 0.4}[dtype]
    require_near(routed(name, device, dtype), routed(name, "cpu", torch.float32), allowed)


def test_a_batch_is_queued_without_a_wait_for_the_gpu(device, world):
    options = ModelOptions(path=str(world.model), device=device, dtype="bfloat16")
    scorer, prompt = HfReference(options).open(), np.arange(3, 40, dtype=np.int32)
    trees = [Tree(prompt[:size], (prompt[:9], prompt[: 2 * size])) for size in (12, 7, 5)]
    expected = [scorer.score(batch) for batch in (trees, trees[1:])]  # its kernels are compiled
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        reads = [scorer.launch(batch) for batch in (trees, trees[1:])]
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert [read().tobytes() for read in reads] == [values.tobytes() for values in expected]


def test_a_gpu_hashes_as_a_cpu_does(device):
    streams = torch.tensor([stream_of("p", 0, n) for n in range(64)])
    tokens = torch.arange(1000)
    there = uniforms(streams.to(device), 3, tokens.to(device))
    assert torch.equal(there.cpu(), uniforms(streams, 3, tokens))
