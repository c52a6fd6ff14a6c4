"""Where the values of each parameter lie in the flat tensors of a ZeRO stage, on each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

# DeepSpeed's of ZeRO 1 and 2: the flat tensor is padded to a multiple of this many values per rank.
ALIGNMENT = 2


@dataclass(frozen=True)
class Stretch:
    """A stretch of one parameter in a flat tensor."""

    name: str
    begin: int  # in the parameter, which is flattened too
    length: int
    at: int  # in the flat tensor


@dataclass(frozen=True)
class Partition:
    """What one rank holds of a group of parameters, in one flat tensor."""

    length: int  # of the tensor, padding included
    stretches: tuple[Stretch, ...]

    @property
    def used(self) -> int:
        """The length without the padding at the end, which may be left out on disk."""
        return max((stretch.at + stretch.length for stretch in self.stretches), default=0)


@dataclass(frozen=True)
class RankSpread:
    """How an optimizer's parameters are spread over the ranks; sizes by name, group by group."""

    stage: int
    ranks: int
    groups: tuple[Mapping[str, int], ...]  # without ZeRO a group is one parameter
    paddings: tuple[Sequence[int], ...] = ()  # behind each parameter of a group; () is none

    @property
    def sizes(self) -> dict[str, int]:
        """Values of each parameter."""
        return {name: size for group in self.groups for name, size in group.items()}

    def partition(self, group: int, rank: int) -> Partition:
        """What a rank holds of a group."""
        sizes = self.groups[group]
        if self.stage == 0:
            return split_each(sizes, 0, ranks=1)
        if self.stage == 3:
            return split_each(sizes, rank, ranks=self.ranks)
        paddings = self.paddings[group] if self.paddings else [0] * len(sizes)
        return split_together(sizes, paddings, rank, ranks=self.ranks)


def split_together(
    sizes: Mapping[str, int], paddings: Sequence[int], rank: int, *, ranks: int
) -> Partition:
    """ZeRO 1 and 2: the parameters stand end to end, and all of them are cut into equal parts."""
    widths = [size + padding for size, padding in zip(sizes.values(), paddings, strict=True)]
    part = -(-sum(widths) // (ALIGNMENT * ranks)) * ALIGNMENT
    low, high = rank * part, (rank + 1) * part
    stretches = []
    for (name, size), place in zip(sizes.items(), accumulate(widths, initial=0), strict=False):
        begin, end = max(low, place), min(high, place + size)
        if begin < end:
            stretches.append(Stretch(name, begin - place, end - begin, begin - low))
    return Partition(part, tuple(stretches))


def split_each(sizes: Mapping[str, int], rank: int, *, ranks: int) -> Partition:
    """ZeRO 3: each parameter is cut into equal parts by itself; the last one may be padded."""
    parts = [-(-size // ranks) for size in sizes.values()]
    stretches = []
    for (name, size), part, at in zip(
        sizes.items(), parts, accumulate(parts, initial=0), strict=False
    ):
        begin, end = rank * part, min((rank + 1) * part, size)
        if begin < end:
            stretches.append(Stretch(name, begin, end - begin, at))
    return Partition(sum(parts), tuple(stretches))


class ScatteredValues:
    """Values of parameters under a key, as `weight`, in views of the tensors that hold them."""

    def __init__(self) -> None:
        self._views: defaultdict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)
        self._dtypes: dict[str, torch.dtype] = {}

    @property
    def keys(self) -> list[str]:
        """Every key, in the order in which they were added."""
        return list(self._dtypes)

    def add(self, key: str, partition: Partition, flat: Tensor) -> None:
        """Adds what a partition holds; ValueError where the tensor is not of its length."""
        if not partition.used <= flat.numel() <= partition.length:
            raise ValueError(f"{key} has {flat.numel():,} values in a part of {partition.length:,}")
        self._dtypes.setdefault(key, flat.dtype)
        for stretch in partition.stretches:
            view = flat.view(-1)[stretch.at : stretch.at + stretch.length]
            self._views[key, stretch.name].append((stretch.begin, view))

    def fill(self, key: str, partition: Partition) -> Tensor:
        """A new flat tensor of a partition; zero where there is padding, or nothing was added."""
        flat = torch.zeros(partition.length, dtype=self._dtypes[key])
        for stretch in partition.stretches:
            into = flat[stretch.at : stretch.at + stretch.length]
            for begin, view in self._views.get((key, stretch.name), ()):
                low = max(begin, stretch.begin)
                high = min(begin + len(view), stretch.begin + stretch.length)
                if low < high:
                    into[low - stretch.begin : high - stretch.begin] = view[
                        low - begin : high - begin
                    ]
        return flat
