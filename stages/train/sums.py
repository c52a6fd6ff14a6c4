"""Values added up over micro-batches and ranks, and divided once: never a mean of means."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ...schemas.batches import Engine
    from ..methods.recipe import Outcome


Totals = dict[str, tuple[float, ...]]  # by name: the sum of all values, how many there were


class Sums:
    """Per name, the total of all values and how many there were."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}  # each (2,) float64: total, count

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Adds every value of each name; a name with no value is known all the same."""
        for name, given in values.items():
            exact = given.detach().double()
            self._add(name, exact.sum(), exact.numel())

    def add_outcome(self, outcome: Outcome) -> None:
        """Adds what one micro-batch gave."""
        for name, part in outcome.totals.items():
            self._add(name, part.total.double(), part.count)
        self.add(outcome.metrics)

    def _add(self, name: str, total: Tensor, count: float) -> None:
        added = torch.stack([total, total.new_tensor(count)])
        self._totals[name] = self._totals.get(name, torch.zeros_like(added)) + added

    def totals(self, engine: Engine) -> Totals:
        """Over all ranks; names without a value are left out.

        Every rank has the same names: a method reports the same whatever it is given.
        """
        names = sorted(self._totals)
        if not names:
            return {}
        reduced = engine.total(torch.stack([self._totals[name] for name in names])).tolist()
        pairs = zip(names, reduced, strict=True)
        return {name: (total, count) for name, (total, count) in pairs if count}


def means_of(totals: Totals) -> dict[str, float]:
    """Each total divided by its count."""
    return {name: total / count for name, (total, count) in totals.items()}


def added(some: Totals, others: Totals) -> Totals:
    """Both taken together, name by name."""
    none = (0.0, 0.0)
    sums: Totals = {}
    for name in {**some, **others}:
        (total, count), (more, again) = some.get(name, none), others.get(name, none)
        sums[name] = (total + more, count + again)
    return sums


def finite(totals: Totals) -> Totals:
    """Those that can be added to others without spoiling them."""
    return {name: one for name, one in totals.items() if math.isfinite(one[0])}
