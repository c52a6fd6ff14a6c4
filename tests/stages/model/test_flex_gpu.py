"""FlexAttention's kernel on a GPU beside padded trees under a dense mask: `make test-gpu`."""

from dataclasses import replace

import pytest
import torch

from align.schemas.config import LoraOptions
from align.stages.model import logprobs
from align.stages.model.flex_attention import compiled_flex_attention, flex_masks, padded_to_blocks
from align.stages.model.load import add_lora
from align.stages.model.policy import Policy, turn_dropout_off
from align.stages.model.reference import TreeScorer
from support.families import SLIDING, TREE_FAMILIES, drawn_trees, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # the compiler has advice for other programs
]

# The kernel takes heads of at least 16 elements; windows are longer and shorter than a block.
WIDE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 4096, "n_embd": 128}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen2 with windows": {**SLIDING, "sliding_window": 40},
    "qwen3": {"head_dim": 128},
    "gemma": {"head_dim": 256},
    "gemma2": {**SLIDING, "sliding_window": 150, "attn_logit_softcapping": 2.0},
    "gemma3": {**SLIDING, "sliding_window": 150},
    "mistral with a window": {"sliding_window": 150},
    "phi": {},
    "gpt2": {"n_positions": 4096},
}
TREES = tuple(drawn_trees(0, tokens=1500, longest=300))
# float32: of rounding alone. bfloat16: both ways round what they add up, each in its own order.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def model_of(name, device, dtype):
    kind, settings = TREE_FAMILIES[name]
    drawn = {"initializer_range": 0.1, **settings, **WIDE, **FAMILIES[name]}
    # Older versions of transformers let sdpa leave out the cap.
    attention = "eager" if "attn_logit_softcapping" in drawn else None
    model = tiny_model(kind, drawn, attention).to(device, dtype)
    turn_dropout_off(model)
    return model


def outcome(policy, layout, trees=TREES):
    policy.path = replace(policy.path, layout=layout)
    policy.zero_grad()
    numbers = policy(trees)
    generator = torch.Generator().manual_seed(0)
    slopes = torch.randn(numbers.shape, generator=generator).to(numbers.device)
    (numbers * slopes).sum().backward()
    learning = [one.grad.flatten().float() for one in policy.parameters() if one.requires_grad]
    return numbers.detach().float(), torch.cat(learning)


def gap(found, expected):
    """The length of the difference, as a share of the length of what it should be."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_and_gradients_are_those_of_padded_trees(device, name, dtype):
    policy = Policy(model_of(name, device, dtype))
    assert policy.path.layout == "flex"
    found, expected = outcome(policy, "flex"), outcome(policy, "tree")
    assert gap(found[0], expected[0]) < ALLOWED[dtype]
    assert gap(found[1], expected[1]) < ALLOWED[dtype]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16_is_as_near_to_float32_as_padded_trees_are(device, name):
    exact = outcome(Policy(model_of(name, device, torch.float32)), "tree")
    policy = Policy(model_of(name, device, torch.bfloat16))
    found, padded = outcome(policy, "flex"), outcome(policy, "tree")
    for ours, theirs, true in zip(found, padded, exact, strict=True):
        assert gap(ours, true) < 1.5 * gap(theirs, true)


def test_recomputed_activations_and_an_adapter_learn_the_same(device):
    model = model_of("gemma3", device, torch.float32)
    policy = Policy(add_lora(model, LoraOptions(enabled=True, rank=2), seed=0).to(device))
    expected = outcome(policy, "tree")
    policy.recompute_activations()
    found = outcome(policy, "flex")
    assert gap(found[0], expected[0]) < 1e-4
    assert gap(found[1], expected[1]) < 1e-4


def test_a_batch_waits_for_nothing_on_its_way_to_the_gpu(device):
    policy = Policy(model_of("gemma3", device, torch.float32))
    config = policy.model.config
    outcome(policy, "flex")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = policy.path.batch(TREES, policy.device)
        flex_masks(batch, config)
        with torch.no_grad():
            logprobs.last_states(policy.model, batch, policy.path)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_it_is_compiled_once_for_batches_of_every_length(device, family):
    scorer = TreeScorer(model_of(family, device, torch.float32).requires_grad_(False))
    counters = torch._dynamo.utils.counters
    lengths, graphs = set(), set()
    for seed in range(12):
        trees = drawn_trees(seed, tokens=200 * (seed + 1), longest=60)
        lengths.add(padded_to_blocks(sum(tree.num_tokens for tree in trees)))
        scorer.score(trees)
        graphs.add(counters["stats"]["unique_graphs"])
    assert compiled_flex_attention() is compiled_flex_attention()
    assert len(lengths) > 8
    assert len(graphs) == 1
