"""The first changes of settings with which a training fits into the memory of a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...schemas.config import Config
from .memory_plan import Components, MemoryPlanner, Way
from .remedies import REMEDIES, Attempt, Changes, Remedy, Situation, attempts, changed


@dataclass(frozen=True)
class MemoryLimits:
    """The bytes that a rank can fill of its GPU, and of the CPU's memory."""

    usable: int
    host: float = math.inf

    def hold(self, components: Components) -> bool:
        """Whether it fits into both."""
        return components.peak <= self.usable and components.host <= self.host


@dataclass(frozen=True)
class Tried:
    """Settings that were changed, and the memory that they need."""

    attempt: Attempt
    changes: Changes
    way: Way
    components: Components


def search(
    now: Situation,
    planner_of: Callable[[Config], MemoryPlanner],
    limits: MemoryLimits,
    own: Tried,
    remedies: Sequence[Remedy] = REMEDIES,
) -> Tried:
    """The trial with the least changes that fits, or else the smallest one."""
    nearest = own
    for attempt in attempts(now, remedies):
        # Tracing takes a second: of each attempt the smallest choice comes first, and none where
        # the update alone takes too much.
        *gentler, smallest = attempt.choices
        planner = planner_of(changed(now.config, smallest))
        limit = max(limits.usable, nearest.components.peak)
        if not planner.is_possible(planner.own_way) or _update_of(planner) > limit:
            continue
        found = _trial(attempt, smallest, planner)
        if found.components.host > limits.host:
            continue
        if not limits.hold(found.components):
            nearest = min(nearest, found, key=lambda one: one.components.peak)
            continue
        for changes in gentler:
            more = _trial(attempt, changes, planner_of(changed(now.config, changes)))
            if limits.hold(more.components):
                return more
        return found
    return nearest


def _trial(attempt: Attempt, changes: Changes, planner: MemoryPlanner) -> Tried:
    way = planner.own_way
    return Tried(attempt, changes, way, planner.components(way))


def _update_of(planner: MemoryPlanner) -> int:
    held = planner.constant(planner.own_way)
    return held.weights + held.optimizer + held.buffers + held.update
