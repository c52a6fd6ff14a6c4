"""The largest difference of two right results in float32, and of what is computed from them."""

import numpy as np

from align.schemas.rows import LEAST

UNIT = 2.0**-24  # rounding shifts a number by so much of itself at most
NATS = LEAST  # a sequence, and so a mean of ratios, and a reward where beta is 1 or less
STEP = 1e-4  # of a gradient, or of its norm: n u for the thousand tokens of a step is 6e-5
# AdamW moves by lr g / (|g| + epsilon). Beside the usual 1e-8 that is a whole step where nothing
# but rounding is left of g; beside this a gradient that is 1e-7 off moves a thousandth of it more.
EPSILON = 1e-4


def apart(rates, *, norm=1.0):
    """The largest difference of weights trained with EPSILON, for a sum of learning rates.

    Gradients are clipped to a norm, and elements of them 1e-7 of it apart.
    """
    return rates * norm * 1e-7 / EPSILON


def largest_difference(some, others):
    """The largest difference between the numbers of two lists."""
    return np.abs(np.array(some) - np.array(others)).max()
