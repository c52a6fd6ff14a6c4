"""What `make test-kernels` sets reaches torch in the process of a test."""

import math
import os

import pytest
import torch

from align.stages.model.head.fused_head import HeadSpec, OutputHead
from align.stages.model.head.fused_head_backward import fused_rows

pytestmark = pytest.mark.numeric


def test_torch_computes_with_the_kernels_the_threads_and_the_noise_that_are_set():
    wanted = os.environ.get("ATEN_CPU_CAPABILITY")
    assert wanted in {None, torch.backends.cpu.get_cpu_capability().lower()}
    assert torch.get_num_threads() == int(os.environ.get("ALIGN_TEST_THREADS") or 1)
    places = 32  # each is off by noise of its own
    targets = torch.zeros(places, dtype=torch.long)
    head = OutputHead(torch.eye(2), None, HeadSpec())
    logps = fused_rows(head, torch.ones(places, 2), targets, purity=False)[0].tolist()
    off = max(abs(logp / -math.log(2) - 1) / 2**-23 for logp in logps)
    noise = float(os.environ.get("ALIGN_TEST_NOISE") or 0)
    assert noise / 2 <= off <= noise + 1
