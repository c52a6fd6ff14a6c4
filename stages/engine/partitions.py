"""Layout of the parameters in the flat tensors of a ZeRO stage, on each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

# Of ZeRO 1 and 2: DeepSpeed pads the flat tensor to a multiple of this many values per rank.
ALIGNMENT = 2
AT_ONCE = 1 << 24  # values


@dataclass(frozen=True)
class Fragment:
    """A contiguous part of one parameter in a flat tensor."""

    name: str
    begin: int  # in the parameter, which is flattened too
    length: int
    at: int  # in the flat tensor


@dataclass(frozen=True)
class Partition:
    """One rank's part of a group of parameters, in one flat tensor."""

    length: int  # of the tensor, padding included
    fragments: tuple[Fragment, ...]

    @property
    def used(self) -> int:
        """The length without the padding at the end, which may be left out on disk."""
        return max((fragment.at + fragment.length for fragment in self.fragments), default=0)


@dataclass(frozen=True)
class PartitionLayout:
    """The partitioning of an optimizer's parameters over ranks; sizes by name, group by group."""

    stage: int
    ranks: int
    groups: tuple[Mapping[str, int], ...]  # without ZeRO a group is one parameter
    paddings: tuple[Sequence[int], ...] = ()  # after each parameter of a group; () is none

    @property
    def sizes(self) -> dict[str, int]:
        """The number of values of each parameter."""
        return {name: size for group in self.groups for name, size in group.items()}

    def partition(self, group: int, rank: int) -> Partition:
        """A rank's part of a group."""
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
    """A partition of ZeRO 1 and 2: the parameters, end to end, are cut into equal parts."""
    widths = [size + padding for size, padding in zip(sizes.values(), paddings, strict=True)]
    part = -(-sum(widths) // (ALIGNMENT * ranks)) * ALIGNMENT
    low, high = rank * part, (rank + 1) * part
    fragments = []
    for (name, size), start in zip(sizes.items(), accumulate(widths, initial=0), strict=False):
        begin, end = max(low, start), min(high, start + size)
        if begin < end:
            fragments.append(Fragment(name, begin - start, end - begin, begin - low))
    return Partition(part, tuple(fragments))


def split_each(sizes: Mapping[str, int], rank: int, *, ranks: int) -> Partition:
    """A partition of ZeRO 3: each parameter is cut into equal parts; the last may be padded."""
    parts = [-(-size // ranks) for size in sizes.values()]
    fragments = []
    for (name, size), part, at in zip(
        sizes.items(), parts, accumulate(parts, initial=0), strict=False
    ):
        begin, end = rank * part, min((rank + 1) * part, size)
        if begin < end:
            fragments.append(Fragment(name, begin, end - begin, at))
    return Partition(sum(parts), tuple(fragments))


def require_length(key: str, partition: Partition, flat: Tensor) -> None:
    """ValueError unless a tensor has the length of its partition, with or without the padding."""
    if not partition.used <= flat.numel() <= partition.length:
        raise ValueError(f"{key} has {flat.numel():,} values in a part of {partition.length:,}")


def is_finite(values: Tensor) -> bool:
    """Whether all are finite, looked at some at a time: torch makes a copy to tell."""
    flat = values.reshape(-1)
    starts = range(0, flat.numel(), AT_ONCE)
    return all(bool(flat[at : at + AT_ONCE].isfinite().all()) for at in starts)


class ScatteredValues:
    """Values of parameters by key, such as `weight`, as views of flat tensors of many ranks."""

    def __init__(self) -> None:
        self._views: defaultdict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)
        self._dtypes: dict[str, torch.dtype] = {}

    @property
    def keys(self) -> list[str]:
        """The keys in the order in which they were added."""
        return list(self._dtypes)

    def add(self, key: str, partition: Partition, flat: Tensor) -> None:
        """Adds the values of a partition; ValueError if the tensor is not of its length."""
        require_length(key, partition, flat)
        self._dtypes.setdefault(key, flat.dtype)
        for fragment in partition.fragments:
            view = flat.view(-1)[fragment.at : fragment.at + fragment.length]
            self._views[key, fragment.name].append((fragment.begin, view))

    def fill(self, key: str, partition: Partition) -> Tensor:
        """A new flat tensor of a partition; zero in padding and where nothing was added."""
        flat = torch.zeros(partition.length, dtype=self._dtypes[key])
        for fragment in partition.fragments:
            into = flat[fragment.at : fragment.at + fragment.length]
            for begin, view in self._views.get((key, fragment.name), ()):
                low = max(begin, fragment.begin)
                high = min(begin + len(view), fragment.begin + fragment.length)
                if low < high:
                    into[low - fragment.begin : high - fragment.begin] = view[
                        low - begin : high - begin
                    ]
        return flat
