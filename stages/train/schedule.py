"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...schemas.config import TrainOptions


def learning_rate(step: int, total_steps: int, options: TrainOptions) -> float:
    """The rate of the `step`-th update (from 0): a straight rise, then the chosen fall."""
    rise = warmup_steps(total_steps, options)
    if step < rise:
        return options.lr * (step + 1) / rise
    done = (step - rise) / max(1, total_steps - rise)
    floor = options.min_lr
    if options.schedule == "constant":
        return options.lr
    if options.schedule == "linear":
        return options.lr * max(floor, 1 - (1 - floor) * done)
    return options.lr * (floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


def warmup_steps(total_steps: int, options: TrainOptions) -> int:
    """Below 1 `warmup` is a share of all steps, from 1 on a number of them."""
    if options.warmup < 1:
        # Rounded first: 0.07 * 100 is a little above 7 in floating point.
        return math.ceil(round(options.warmup * total_steps, 6))
    return round(options.warmup)
