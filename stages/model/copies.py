"""Non-blocking host-to-device copies through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on a device; on a CPU they are not copied.

    Out of pinned memory a copy waits for its turn in the stream of the device, not the host for
    the copy. torch frees that memory when the copy has been made.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


ALIGNED = 16  # elements: products and kernels want their operands to begin at such places


def all_on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Arrays of one dtype on a device, by one copy."""
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
