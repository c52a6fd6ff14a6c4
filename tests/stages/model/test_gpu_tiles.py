"""What a GPU makes of a tile of logits, run here on the CPU."""

import logging

import pytest
import torch
from torch._inductor import config as inductor

from align.stages.model import gpu_tiles


@pytest.fixture
def logits(cpu_only):
    generator = torch.Generator().manual_seed(0)
    return 5 * torch.randn(7, 33, generator=generator)


@pytest.fixture
def cpu_only():
    gpu_tiles.compiled.cache_clear()
    yield
    gpu_tiles.compiled.cache_clear()


def test_the_sums_of_a_tile_equal_those_in_float64(logits):
    exact = logits.double()
    torch.testing.assert_close(
        gpu_tiles.log_sum_exp(logits).double(), exact.logsumexp(1), rtol=0, atol=1e-5
    )
    purity = exact.softmax(1).square().sum(1).log()
    torch.testing.assert_close(gpu_tiles.log_purity(logits).double(), purity, rtol=0, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_deviations_are_the_slopes_of_minus_log_p(logits, softcap):
    raw = logits.double().requires_grad_()
    shown = softcap * torch.tanh(raw / softcap) if softcap else raw
    targets = torch.tensor([0, 5, 32, 40, -1, 7, 12])  # two are of other tiles
    inside = (targets >= 0) & (targets < 33)
    beyond = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    logsumexp = torch.logaddexp(shown.logsumexp(1), beyond)  # of this tile and the others
    chosen = shown[torch.arange(7), targets.clamp(0, 32)]
    (logsumexp - torch.where(inside, chosen, 0.0)).sum().backward()
    found = gpu_tiles.deviations(
        shown.detach().float(), logsumexp.detach().float(), targets, softcap, torch.float32
    )
    torch.testing.assert_close(found.double(), raw.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # it looks for a compiler, by a process of its own
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_without_a_compiler_a_tile_is_computed_uncompiled_and_that_is_said_once(
    logits, monkeypatch, caplog
):
    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    caplog.set_level(logging.WARNING, logger="align")
    for _ in range(2):
        found = gpu_tiles.compiled(gpu_tiles.log_sum_exp)(logits)
        assert torch.equal(found, gpu_tiles.log_sum_exp(logits))
    said = [
        record.message for record in caplog.records if record.name == "align"
    ]  # torch says more
    assert [text.split(":")[0] for text in said] == [
        "The output head is not compiled, which is slower"
    ]
