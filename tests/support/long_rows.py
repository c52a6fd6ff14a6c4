"""Prints what one long row takes: MiB of tensors held at once, and elements of the largest.

Given the lengths; half of a row is its prompt. The model is so small that activations are few.
"""

import json
import sys

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from align.schemas.rows import Tree
from align.stages.model.policy import Policy
from support.largest_storage import LargestStorage
from support.live_bytes import LiveBytes
from support.memory_growth import draw

VOCABULARY = 16_384
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


def main(lengths):
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    seen = {}
    for kind, make in MODELS.items():
        policy = Policy(make())
        assert (policy.path.layout, policy.path.head) == ("packed", "fused")
        learn(policy, row_of(random, 64))  # what is made once: buffers, gradients of weights
        for stage in (score, learn):
            seen[f"{kind}, {stage.__name__}"] = [
                cost(stage, policy, row_of(random, length)) for length in lengths
            ]
    print(json.dumps(seen))


def row_of(random, length):
    halves = (draw(random, VOCABULARY, length // 2) for _ in "12")
    prompt, branch = halves
    return (Tree(prompt, (branch,)),)


@torch.no_grad()
def score(policy, trees):
    policy(trees)


def learn(policy, trees):
    policy(trees).sum().backward()


def cost(stage, policy, trees):
    with LiveBytes() as live, LargestStorage(ignore=set()) as largest:
        stage(policy, trees)
    return live.most / 2**20, largest.elements


if __name__ == "__main__":
    main([int(length) for length in sys.argv[1:]])
