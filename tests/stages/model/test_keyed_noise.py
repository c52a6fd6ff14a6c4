"""Noise by a hash: the generator it is built on, its distribution, and what it depends on."""

import pytest
import torch

from align.stages.model.keyed_noise import KeyedNoise, stream_of, uniforms

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
SCORES = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -torch.inf])


def splitmix(word):
    """The finalizer of splitmix64, in Python's integers."""
    word &= MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def by_hand(stream, position, token):
    state = splitmix(stream + (position + 1) * STEP)
    return ((splitmix(state + (token + 1) * STEP) >> 12) + 0.5) / 2**52  # in (0, 1): finite noise


def test_torch_hashes_by_splitmix64_as_python_does():
    # The first two outputs of splitmix64 seeded with 0, as its author's program prints them.
    assert [splitmix(STEP), splitmix(2 * STEP)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    streams = [stream_of("prompt", seed, 3) for seed in range(4)] + [0, -1, 2**63 - 1, -(2**63)]
    tokens = [0, 1, 17, 151_935]
    for position in (0, 1, 511, 100_000):
        found = uniforms(torch.tensor(streams), position, torch.tensor(tokens))
        wanted = [[by_hand(stream, position, token) for token in tokens] for stream in streams]
        assert found.tolist() == wanted


def test_a_stream_differs_by_prompt_seed_and_number():
    names = [(p, s, n) for p in ("1", "11") for s in range(20) for n in range(20)]
    assert len({stream_of(*name) for name in names}) == len(names)
    assert all(-(2**63) <= stream_of(*name) < 2**63 for name in names)


def drawn(streams, position=0):
    prompt_length = 5
    ids = torch.zeros((len(streams), prompt_length + position), dtype=torch.int64)
    noise = KeyedNoise(streams, prompt_length, torch.device("cpu"))
    return noise(ids, SCORES.expand(len(streams), -1)).argmax(dim=-1)


def test_tokens_are_drawn_with_their_probabilities_over_samples_and_over_positions():
    stream = [stream_of("p", 0, 0)]
    for tokens in (
        drawn([stream_of("p", 0, number) for number in range(20_000)]),
        torch.cat([drawn(stream, position=position) for position in range(2000)]),
    ):
        *counts, ruled_out = torch.bincount(tokens, minlength=6)
        assert ruled_out == 0
        expected = SCORES.softmax(0)[:-1] * len(tokens)
        chi_square = float(((torch.stack(counts) - expected) ** 2 / expected).sum())
        assert chi_square < 18.467  # of four degrees: exceeded by one in a thousand fair draws


@pytest.mark.gpu
def test_a_gpu_hashes_as_a_cpu_does(device):
    streams = torch.tensor([stream_of("p", 0, n) for n in range(64)])
    tokens = torch.arange(1000)
    there = uniforms(streams.to(device), 3, tokens.to(device))
    assert torch.equal(there.cpu(), uniforms(streams, 3, tokens))
