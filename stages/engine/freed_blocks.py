"""Makes the C library give the memory of freed tensors back to the system.

glibc keeps what is freed in one heap. A tensor's small neighbours there outlive it, so the hole
that it leaves is soon too small for the next tensor of its size, and the heap grows by a GiB that
nobody uses. A block that is mapped by itself leaves no hole, but its pages are new each time; those
of the holes can be given back as well, now and then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_C: Any = ctypes.CDLL(None) if os.name == "posix" else None
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
# Blocks mapped by themselves. With fewer the heap has holes; with more, new pages cost time.
LARGE, LARGE_WHILE_SHARDING = 8 << 20, 1 << 20
# What the end of the heap may have free. glibc follows its own threshold no more once one is set.
SPARE = 64 << 20
HOLES = 256 << 20  # free in the heap; to give fewer back costs a small model 4 % of its time


def give_large_blocks_back(large: int = LARGE) -> None:
    """Maps blocks of this size and more by themselves from here on; only glibc can."""
    set_option = getattr(_C, "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, large)
        set_option(M_TRIM_THRESHOLD, SPARE)


class _Heap(ctypes.Structure):
    """What mallinfo2 says of glibc's heap, in bytes."""

    _fields_ = [
        ("others", ctypes.c_size_t * 8),
        ("free", ctypes.c_size_t),
        ("free_at_the_end", ctypes.c_size_t),
    ]


def give_holes_back() -> None:
    """Gives back the pages of holes in the heap, where there are many; only glibc can."""
    heap_now = getattr(_C, "mallinfo2", None)
    if heap_now is not None:
        heap_now.restype = _Heap
        if heap_now().free > HOLES:
            _C.malloc_trim(0)


@contextmanager
def giving_more_blocks_back() -> Iterator[None]:
    """Inside, also blocks of the size of most weights: while whole ones are cut into shards."""
    give_large_blocks_back(LARGE_WHILE_SHARDING)
    try:
        yield
    finally:
        give_large_blocks_back()
