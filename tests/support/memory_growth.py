"""Prints how many MiB of tensors are made and held at once while one batch is run."""

import json
import sys

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from align.schemas.rows import Tree
from align.stages.model.policy import Policy
from align.stages.model.reference import TreeScorer
from support.live_bytes import LiveBytes

TREES, PROMPT, BRANCH = 8, 64, 64  # each tree has two branches: 1,536 tokens, 1,024 of completions


def main(sizes):
    torch.set_num_threads(1)
    peaks = {name: [peak_above(MEASURED[name], size) for size in sizes] for name in MEASURED}
    print(json.dumps(peaks))


def peak_above(score, vocabulary):
    """Loads, scores once to warm up, then measures the second time."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(vocabulary)).eval()
    random = np.random.default_rng(0)
    trees = [
        Tree(
            draw(random, vocabulary, PROMPT), tuple(draw(random, vocabulary, BRANCH) for _ in "12")
        )
        for _ in range(TREES)
    ]
    run = score(model)
    run(trees[:1])
    with LiveBytes(model.parameters()) as live:
        run(trees)
    return live.most / 2**20


def with_align(model):
    scorer = TreeScorer(model)
    assert (scorer.path.layout, scorer.path.head) == ("packed", "fused")
    return scorer.score


def with_logits(model):
    """What everybody writes first: all logits of a tree's branches, then log-softmax."""

    @torch.inference_mode()
    def score(trees):
        ids = [np.concatenate([tree.prompt, branch]) for tree in trees for branch in tree.branches]
        logits = model(input_ids=torch.from_numpy(np.stack(ids)).long(), use_cache=False).logits
        return torch.log_softmax(logits[:, PROMPT - 1 : -1], dim=-1)

    return score


def training_with_align(model):
    policy = Policy(model)
    assert (policy.path.layout, policy.path.head) == ("packed", "fused")

    def learn(trees):
        policy(tuple(trees)).sum().backward()
        policy.zero_grad()

    return learn


def training_with_a_frozen_head(model):
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    return training_with_align(model)


def training_with_logits(model):
    def learn(trees):
        ids = [np.concatenate([tree.prompt, branch]) for tree in trees for branch in tree.branches]
        tokens = torch.from_numpy(np.stack(ids)).long()
        logits = model(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
        logps = torch.log_softmax(logits, dim=-1)
        logps.gather(2, tokens[:, PROMPT:, None]).sum().backward()
        model.zero_grad()

    return learn


MEASURED = {
    "align": with_align,
    "logits": with_logits,
    "training": training_with_align,
    "training, frozen head": training_with_a_frozen_head,
    "training with logits": training_with_logits,
}


def config_of(vocabulary):
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )


def draw(random, vocabulary, size):
    return random.integers(3, vocabulary, size).astype(np.int32)


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
