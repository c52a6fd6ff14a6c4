"""torch for the losses, imported at its first use, and bounded exponentials and sums.

Importing torch takes seconds, and listing or checking methods does not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F  # noqa: N812 - as the field calls it
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

    torch, F, Tensor = _Later("torch"), _Later("torch.nn.functional"), Any

__all__ = ["F", "Tensor", "bounded_exp", "bounded_expm1", "sums_of", "torch"]

# exp(80) still fits float32, and a sum of many such terms float64.
LARGEST_EXPONENT = 80.0


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), constant above LARGEST_EXPONENT."""
    return torch.exp(x.clamp(max=LARGEST_EXPONENT))


def bounded_expm1(x: Tensor) -> Tensor:
    """exp(x) - 1, exact near 0, and constant above LARGEST_EXPONENT."""
    return torch.expm1(x.clamp(max=LARGEST_EXPONENT))


def sums_of(values: Tensor, counts: Tensor) -> Tensor:
    """The sum over each completion's tokens, (completions,), in a fixed order."""
    if not len(counts):
        return values
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)
