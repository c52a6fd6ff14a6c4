"""Rows of up to 32k tokens on a GPU: what one more token takes of its memory."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from align.stages.model.policy import Policy
from support.live_bytes import LiveBytes
from support.long_rows import SHAPE, row_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # the compiler has advice for other programs
]

LENGTHS = (4096, 8192, 16_384, 32_768)
WIDE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}


def peak(device, policy, trees):
    """Most MiB that the row takes above what is held before it."""
    if device == "cpu":
        with LiveBytes() as live:
            policy(trees).sum().backward()
        return live.most / 2**20
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    policy(trees).sum().backward()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def test_memory_grows_with_a_row_and_not_with_its_square(device):
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE | WIDE)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = Policy(LlamaForCausalLM(config).to(device, dtype))
    assert policy.path.layout == ("flex" if device == "cuda" else "packed")
    random = np.random.default_rng(0)
    peak(device, policy, row_of(random, LENGTHS[0]))  # gradients of the weights stay
    peaks = [peak(device, policy, row_of(random, length)) for length in LENGTHS]
    # A byte for each pair of 32k tokens would be 1,024 MiB, and their logits 2,048 in float32.
    assert peaks[-1] - peaks[0] < 512, peaks
    more, twice_as_many = peaks[2] - peaks[1], peaks[3] - peaks[2]  # of 8k tokens, of 16k
    assert twice_as_many < 2.5 * more + 64, peaks
