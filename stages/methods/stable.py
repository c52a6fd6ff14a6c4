"""The few functions that overflow or cancel when written as in the papers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Certain to the last bit of float32: a mean log-prob closer to 0 has odds that are only noise.
NEARLY_CERTAIN = -1e-10
# exp(80) still fits float32, and a sum of many such terms float64.
LARGEST_EXPONENT = 80.0


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact at both ends (https://doi.org/10.18637/jss.v038.c01)."""
    # Each form sees only its own half: a NaN gradient of the other one would spread from where().
    far = torch.log1p(-torch.exp(x.clamp(max=-math.log(2))))
    near = torch.log(-torch.expm1(x.clamp(min=-math.log(2))))
    return torch.where(x < -math.log(2), far, near)


def log_odds(mean_logps: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(mean_logps), finite even where p rounds to 1."""
    below_one = mean_logps.clamp(max=NEARLY_CERTAIN)
    return below_one - log1mexp(below_one)


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), constant where it would leave the range that can be summed."""
    return torch.exp(x.clamp(max=LARGEST_EXPONENT))
