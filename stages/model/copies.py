"""Non-blocking copies between host and device through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of the values on a device; on a CPU it shares their memory.

    A copy from pinned memory is queued on the device's stream, and the host does not wait for it.
    torch frees the pinned memory after the copy.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


ALIGNED = 16  # elements: operands of matrix products and kernels start at multiples of it


def all_on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors of arrays of one dtype on a device, by a single copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.size // ALIGNED) * ALIGNED for array in arrays]
    starts = np.cumsum([0, *sizes]).tolist()
    together = np.zeros(starts[-1], arrays[0].dtype)
    for array, start in zip(arrays, starts, strict=False):
        together[start : start + array.size] = array.ravel()
    copied = on_device(together, device)
    return [
        copied[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def on_host(values: Tensor) -> Callable[[], NDArray[Any]]:
    """Queues a copy to the host; the returned function waits for this copy only."""
    if values.device.type == "cpu":
        return values.numpy
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    stream = torch.get_device_module(values.device).current_stream(values.device)
    copied = stream.record_event()

    def read() -> NDArray[Any]:
        copied.synchronize()
        return pinned.numpy().copy()  # pinned memory is scarce: the next batch reuses it

    return read
