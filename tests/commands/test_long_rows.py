"""Rows of tens of thousands of tokens: what they take in memory."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from align.schemas.rows import Tree
from align.stages.model.policy import Policy
from support.live_bytes import LiveBytes

VOCABULARY = 16_384
# So small that activations are few.
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 65_536,
}
MODELS = {
    "full": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "window": lambda: MistralForCausalLM(MistralConfig(sliding_window=256, **SHAPE)),
}


def row_of(length):
    """Half of it is its prompt."""
    prompt, branch = np.random.default_rng(0).integers(3, VOCABULARY, (2, length // 2), "int32")
    return (Tree(prompt, (branch,)),)


@torch.no_grad()
def score(policy, trees):
    policy(trees)


def learn(policy, trees):
    policy(trees).sum().backward()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [score, learn])
def test_a_token_more_costs_its_activations_and_no_mask_or_logits(model, stage):
    """A mask of 16k tokens would be 256 MiB, and their logits 1,024."""
    policy = Policy(MODELS[model]())
    assert (policy.path.layout, policy.path.head) == ("packed", "fused")
    learn(policy, row_of(64))  # what is made once: buffers, gradients of weights
    held, lengths = [], (4096, 16_384)
    for length in lengths:
        with LiveBytes() as live:
            stage(policy, row_of(length))
        held.append(live.most)
    # Under 3 KiB: a score of states 16 wide, forward and backward.
    assert held[1] - held[0] < 3 * 1024 * (lengths[1] - lengths[0])
    assert held[1] < 256 * 2**20  # the buffer of the head, the mask, and those activations
