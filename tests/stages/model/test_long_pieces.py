"""Pieces that are too long for one mask are attended with some rows at a time."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from align.schemas.rows import Tree
from align.stages.model import tree_attention
from align.stages.model.policy import Policy
from align.stages.model.tree_attention import pieces_of, tree_batch
from support.rounding import NATS

pytestmark = pytest.mark.numeric

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
CONFIGS = {
    "full": LlamaConfig(**SHAPE),
    "window of 5": MistralConfig(sliding_window=5, **SHAPE),
    "window of 200": MistralConfig(sliding_window=200, **SHAPE),
}


def learned(config):
    torch.manual_seed(0)
    policy = Policy(
        (LlamaForCausalLM if config.model_type == "llama" else MistralForCausalLM)(config)
    )
    assert policy.path.layout == "packed"
    rows = policy(trees())
    (rows.exp() * torch.arange(1, 1 + rows.shape[1])).sum().backward()
    return rows.detach(), [parameter.grad for parameter in policy.parameters()]


def trees():
    random = np.random.default_rng(3)
    shapes = ((40, (33, 1, 7)), (1, (50,)), (90, (2, 30)), (3, (4,)))

    def draw(size):
        return random.integers(0, 97, size, "int32")

    return tuple(Tree(draw(prompt), tuple(map(draw, sizes))) for prompt, sizes in shapes)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("elements", "rows"), [(400, 7), (400, 1), (2000, 16)])
def test_rows_at_a_time_give_the_same_numbers(monkeypatch, name, elements, rows):
    whole, gradients = learned(CONFIGS[name])
    monkeypatch.setattr(tree_attention, "MASK_ELEMENTS", elements)
    monkeypatch.setattr(tree_attention, "MASK_ROWS", rows)
    cut, cut_gradients = learned(CONFIGS[name])
    assert torch.allclose(cut, whole, rtol=0, atol=NATS)
    for some, others in zip(cut_gradients, gradients, strict=True):
        assert (some - others).abs().max() <= 1e-5 * others.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mask_has_no_more_elements_than_it_may(name):
    batch = tree_batch(
        [tree_of(20_000, 12_000), tree_of(5, 20_000)], torch.device("cpu"), packed=True
    )
    for template in pieces_of(batch, CONFIGS[name], torch.float32).templates.values():
        assert not template.is_whole
        assert template.mask.numel() <= tree_attention.MASK_ELEMENTS


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt", [1, 700, 1024, 2047])
def test_no_row_of_an_ordinary_micro_batch_is_cut(name, prompt):
    """2,048 tokens on a CPU: their numbers stay what they are to the last bit."""
    batch = tree_batch([tree_of(prompt, 2048 - prompt)], torch.device("cpu"), packed=True)
    pieces = pieces_of(batch, CONFIGS[name], torch.float32)
    assert all(template.is_whole for template in pieces.templates.values())


def tree_of(prompt, branch):
    return Tree(np.ones(prompt, np.int32), (np.ones(branch, np.int32),))
