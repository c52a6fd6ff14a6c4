"""Sums and joins of small tensors over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor, distributed


def total(values: Tensor) -> Tensor:
    """The sum over ranks, on every rank; the argument is left as it is."""
    summed = values.detach().to(torch.float64, copy=True)
    distributed.all_reduce(summed)
    return summed


def gathered(values: Tensor) -> Tensor:
    """The values of all ranks end to end, in the order of ranks; lengths may differ."""
    values = values.detach().to(torch.float64).contiguous()
    size = distributed.get_world_size()
    own = torch.tensor([len(values)], device=values.device)
    lengths = [torch.empty_like(own) for _ in range(size)]
    distributed.all_gather(lengths, own)
    counts = [int(length) for length in lengths]
    padded = values.new_zeros(max(counts))
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in range(size)]
    distributed.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
