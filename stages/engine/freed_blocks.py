"""Makes the C library return the memory of freed tensors to the system.

glibc keeps freed memory in one heap. Small neighbours of a tensor outlive it, so its hole is soon
too small for the next tensor of its size, and the heap grows by an unused GiB. A block with a
mapping of its own leaves no hole, but needs new pages each time. The pages of holes are returned to
the system now and then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_C: Any = ctypes.CDLL(None) if os.name == "posix" else None
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
# Blocks of this size get their own mapping. A larger size leaves holes, a smaller one costs time.
LARGE, LARGE_WHILE_SHARDING = 8 << 20, 1 << 20
# The free memory kept at the end of the heap; setting any threshold disables glibc's own.
SPARE = 64 << 20
HOLES = 256 << 20  # of free bytes are returned; a smaller limit costs a small model 4 % of its time


def give_large_blocks_back(large: int = LARGE) -> None:
    """Gives blocks of at least this size their own mapping from now on; only with glibc."""
    set_option = getattr(_C, "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, large)
        set_option(M_TRIM_THRESHOLD, SPARE)


class _Heap(ctypes.Structure):
    """The result of mallinfo2 for glibc's heap, in bytes."""

    _fields_ = [
        ("others", ctypes.c_size_t * 8),
        ("free", ctypes.c_size_t),
        ("free_at_the_end", ctypes.c_size_t),
    ]


def give_holes_back() -> None:
    """Returns the pages of holes in the heap to the system, if there are many; only with glibc."""
    heap_now = getattr(_C, "mallinfo2", None)
    if heap_now is not None:
        heap_now.restype = _Heap
        if heap_now().free > HOLES:
            _C.malloc_trim(0)


@contextmanager
def giving_more_blocks_back() -> Iterator[None]:
    """Returns blocks of the size of most weights too, while weights are sharded in the block."""
    give_large_blocks_back(LARGE_WHILE_SHARDING)
    try:
        yield
    finally:
        give_large_blocks_back()
