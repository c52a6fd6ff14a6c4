"""Counter-based noise for drawing tokens: a hash, independent of generator, batch and device.

The drawn token has the largest score plus noise (the Gumbel-max trick), so each token is drawn with
its probability. The noise is a function of the prompt, the seed, the number of the sample, the
position and the token, so a sample is the same in any batch and any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

# The step and the two multipliers of splitmix64 (https://prng.di.unimi.it/splitmix64.c), signed.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)
UNIFORM_BITS = 52  # plus one half: as many as a float64 between 0 and 1 holds


def stream_of(prompt: str, seed: int, number: int) -> int:
    """The key of one sample's noise, as a signed integer of 64 bits."""
    content = hashlib.sha256(f"{prompt} {seed} {number}".encode()).digest()
    return int.from_bytes(content[:8], "big", signed=True)


def uniforms(streams: Tensor, position: int, tokens: Tensor) -> Tensor:
    """Uniform numbers in (0, 1) for each stream and token: (S, T) float64.

    `streams` (S,) and `tokens` (T,) are int64. Integers wrap alike on every device.
    """
    states = _mixed(streams + torch.full_like(streams, position + 1) * STEP)
    words = _mixed(states[:, None] + (tokens + 1) * STEP)
    kept = _shifted(words, 64 - UNIFORM_BITS)
    return kept.double().add_(0.5).mul_(2.0**-UNIFORM_BITS)


def _mixed(words: Tensor) -> Tensor:
    """The finalizer of splitmix64: every bit of the result depends on every bit."""
    words = words ^ _shifted(words, 30)
    words.mul_(FIRST)
    words ^= _shifted(words, 27)
    words.mul_(SECOND)
    words ^= _shifted(words, 31)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's own is arithmetic."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


class KeyedNoise(LogitsProcessor):
    """Adds Gumbel noise of each row's stream to its scores; the largest sum is drawn."""

    def __init__(self, streams: Sequence[int], prompt_length: int, device: torch.device) -> None:
        self._streams = torch.tensor(streams, dtype=torch.int64, device=device)
        self._prompt_length = prompt_length  # with padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores of the next token plus noise, in float64."""
        position = input_ids.shape[1] - self._prompt_length
        tokens = torch.arange(scores.shape[1], device=scores.device)
        drawn = uniforms(self._streams.to(scores.device), position, tokens)
        noise = drawn.log_().neg_().log_()
        return scores.double().sub_(noise)
