"""A scorer that misbehaves on demand."""

from dataclasses import dataclass, field

import numpy as np

from align.schemas.rows import OutOfMemory
from support.stub_reference import StubReference

STUB = StubReference().open()


@dataclass
class Faulty:
    """The stub, with less memory, NaNs behind some tokens, and a memory of its batches."""

    room: int = 10**9  # tokens of a batch, padding included
    refused: int = 0  # the batch, counted from 1, for which there is no memory whatever its size
    pads: bool = True
    poison: dict = field(default_factory=dict)  # token: its log-prob
    spreads: bool = False  # a log-prob that is not finite, to the whole batch
    batches: list = field(default_factory=list)  # tokens of each tree, batch by batch
    events: list = field(default_factory=list)  # which batch was launched, which one read

    def launch(self, trees):
        values, number = self.score(trees), len(self.batches)
        self.events.append(("launch", number))
        return lambda: self.events.append(("read", number)) or values

    def score(self, trees):
        sizes = [tree.num_tokens for tree in trees]
        self.batches.append(sizes)
        tokens = max(sizes) * len(sizes) if self.pads else sum(sizes)
        if tokens > self.room or len(self.batches) == self.refused:
            raise OutOfMemory(f"{sizes} do not fit {self.room}")
        values = STUB.score(trees)
        tokens = np.concatenate([branch for tree in trees for branch in tree.branches])
        for token, value in self.poison.items():
            values[tokens == token] = value
        if self.spreads and not np.isfinite(values).all():
            values[:] = np.nan
        return values

    def describe(self):
        return {"path": "faulty"}
