"""Before each batch all ranks agree whether to run it: none goes ahead alone, none hangs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ...schemas.errors import AlignError, CorruptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...schemas.batches import Engine, MicroBatch, StepBatch
    from .loop import Ending, Halts, Sign
    from .meter import Meter


class Muster:
    """Batches until there are no more, or until some rank has a reason to stop."""

    def __init__(
        self, engine: Engine, batches: Iterator[StepBatch], meter: Meter, halts: Halts
    ) -> None:
        self._next = partial(next_batch, engine, batches, meter, halts)
        self.halted: Ending | None = None
        self.is_save_due = False

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        batch, sign = self._next()
        self.is_save_due = sign == "save"
        self.halted = None if sign == "save" else sign
        if batch is None or self.halted:
            raise StopIteration
        return batch


def next_batch(
    engine: Engine, batches: Iterator[StepBatch], meter: Meter, halts: Halts
) -> tuple[StepBatch | None, Sign | None]:
    """The next batch, if there is one, and whether some rank has a reason to stop or save first."""
    failure: AlignError | None = None
    batch: StepBatch | None = None
    with meter.waiting():
        try:
            batch = next(batches, None)
        except AlignError as error:
            failure = error
    own = _tokens(batch.own + batch.mismatched, meter.pads) if batch else (0, 0)
    signs = [failure is not None, halts.signalled(), halts.is_late(), halts.saving.is_due(), *own]
    failed, signalled, late, save, tokens, padded = engine.total(
        torch.tensor(signs, dtype=torch.float64)
    ).tolist()
    if failure or failed:
        raise failure or CorruptionError("Another rank could not read its rows; it says which.")
    if batch is None:
        return None, None
    meter.runs(tokens=int(tokens), padded=int(padded))
    return batch, "signal" if signalled else "time" if late else "save" if save else None


def _tokens(batches: tuple[MicroBatch, ...], pads: bool) -> tuple[int, int]:
    """Tokens run by this rank, without and with padding."""
    sizes = [[tree.num_tokens for tree in batch.trees] for batch in batches if batch.trees]
    tokens = sum(map(sum, sizes))
    return tokens, sum(len(one) * max(one) for one in sizes) if pads else tokens
