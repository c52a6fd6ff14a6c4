"""The part of the work that one of several processes does, without a word between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..schemas.errors import UsageError
from ..stages.engine.launchers import world_apart

PART = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Part:
    """The i-th of n parts, counted from 1."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @staticmethod
    def read(text: str) -> Part:
        """Reads `2/8`."""
        found = PART.fullmatch(text)
        if not found or int(found[1]) > int(found[2]):
            raise UsageError(f"--part {text}: expected I/N, from 1/N to N/N; for example 2/8.")
        return Part(int(found[1]), int(found[2]))

    def of(self, costs: Sequence[float]) -> list[int]:
        """The items of this part, the most expensive first.

        All items are dealt out in the order of their costs, so parts are about equal, and every
        process that knows the costs knows whose each item is.
        """
        order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
        return order[self.number - 1 :: self.count]

    def first_of(self, costs: Sequence[float]) -> list[int]:
        """All items, those of this part first: work that every part needs before it goes on.

        The others follow from their far end, where the parts at work on them come last.
        """
        own = self.of(costs)
        others = {*range(len(costs))} - {*own}
        return own + sorted(others, key=lambda item: (costs[item], -item))


WHOLE = Part()


def part_of(given: str | None, environment: Mapping[str, str]) -> Part | None:
    """The part that --part names, or that of a rank of torchrun, deepspeed or srun; None: all."""
    world = world_apart(environment)
    if given and world.size > 1:
        raise UsageError("--part: each rank of a launcher makes its own part. Leave --part out.")
    if given:
        return Part.read(given)
    return Part(world.rank + 1, world.size) if world.size > 1 else None
