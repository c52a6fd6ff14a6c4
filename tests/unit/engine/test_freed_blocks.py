"""The memory of what is freed goes back to the system, though neighbours of it stay."""

import ctypes

import numpy as np
import psutil
import pytest

from align.stages.engine.freed_blocks import give_holes_back


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc can")
def test_the_holes_between_what_stays_are_given_back():
    block = 64 << 10  # smaller than what is mapped by itself
    blocks = [np.ones(block, np.uint8) for _ in range(10_000)]
    blocks = blocks[::2]
    full = psutil.Process().memory_info().rss
    give_holes_back()
    assert full - psutil.Process().memory_info().rss > 0.9 * len(blocks) * (block - 4096)
    assert all(one.all() for one in blocks)
