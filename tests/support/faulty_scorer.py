"""A scorer that misbehaves on demand."""

from dataclasses import dataclass, field

import numpy as np

from align.schemas.reference import OutOfMemory
from align.stages.world.stub import StubReference

STUB = StubReference().open()


@dataclass
class Faulty:
    """The stub, with less memory, NaNs behind some tokens, and a memory of its batches."""

    room: int = 10**9  # tokens of a batch, padding included
    pads: bool = True
    poison: dict = field(default_factory=dict)  # token: its log-prob
    batches: list = field(default_factory=list)  # tokens of each tree, batch by batch

    def score(self, trees):
        sizes = [tree.num_tokens for tree in trees]
        self.batches.append(sizes)
        if (max(sizes) * len(sizes) if self.pads else sum(sizes)) > self.room:
            raise OutOfMemory(f"{sizes} do not fit {self.room}")
        values = STUB.score(trees)
        tokens = np.concatenate([branch for tree in trees for branch in tree.branches])
        for token, value in self.poison.items():
            values[tokens == token] = value
        return values

    def describe(self):
        return {"path": "faulty"}
