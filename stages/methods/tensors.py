"""torch for the losses, imported when one is first computed.

It takes seconds to import, and a method is named, explained and checked without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Later:
        """A module that is imported when something in it is first used."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, value)
            return value

    torch = _Later("torch")

__all__ = ["logsigmoid", "pad", "relu", "torch"]


def logsigmoid(values: Tensor) -> Tensor:
    """The log of the sigmoid of each value, exact far from 0 too."""
    return torch.nn.functional.logsigmoid(values)


def relu(values: Tensor) -> Tensor:
    """Each value, and 0 for one below it."""
    return torch.nn.functional.relu(values)


def pad(values: Tensor, widths: tuple[int, int]) -> Tensor:
    """The values with so many zeros before and after them."""
    return torch.nn.functional.pad(values, widths)
