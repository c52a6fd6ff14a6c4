"""Copies from the host to a device, for which nobody waits."""

from __future__ import annotations

from typing import Any

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
