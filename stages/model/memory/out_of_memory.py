"""Recognition of torch's out-of-memory errors, whose words are torch's internals."""

from __future__ import annotations

import torch

NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of torch, or of a CUDA library through it, means out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        word in str(error) for word in NO_MEMORY
    )
