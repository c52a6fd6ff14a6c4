"""Divides work among processes that do not communicate."""

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
            raise UsageError(f"--part {text}: write I/N, from 1/N to N/N, for example 2/8.")
        return Part(int(found[1]), int(found[2]))

    def of(self, costs: Sequence[float]) -> list[int]:
        """The items of this part, the most expensive first.

        Items are dealt out in the order of their costs, so parts are about equal, and every process
        computes the same division from the costs.
        """
        order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
        return order[self.number - 1 :: self.count]

    def first_of(self, costs: Sequence[float]) -> list[int]:
        """All items, those of this part first, for work that every part waits for.

        The other parts' items follow in reverse, so they are not done twice at the same time.
        """
        own = self.of(costs)
        others = {*range(len(costs))} - {*own}
        return own + sorted(others, key=lambda item: (costs[item], -item))


WHOLE = Part()


def part_of(given: str | None, environment: Mapping[str, str]) -> Part | None:
    """The part of --part, or of a rank of torchrun, deepspeed or srun; None: all items."""
    world = world_apart(environment)
    if given and world.size > 1:
        raise UsageError("--part: each rank of a launcher makes its own part. Leave --part out.")
    if given:
        return Part.read(given)
    return Part(world.rank + 1, world.size) if world.size > 1 else None
