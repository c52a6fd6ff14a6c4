"""The caches of a run as the loop sees them: steps to learn from, steps to be measured by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .steps import evaluation_pass
from .stream import eval_stream, steps_per_epoch, stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from ...schemas.batches import Cursor, StepBatch, StepSize
    from .settings import FeedSettings
    from .source import TrainSource


@dataclass(frozen=True)
class CacheFeed:
    """Rows to learn from, and rows held out of them or of another cache."""

    source: TrainSource
    held_out_source: TrainSource
    settings: FeedSettings

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return steps_per_epoch(self.source, self.settings)

    @property
    def has_held_out(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.held_out_source.eval_rows > 0

    def held_out_size(self) -> StepSize:
        """All rows of an evaluation, over all ranks."""
        return evaluation_pass(self.held_out_source.index.held_out, self.settings).size()

    def steps(self, start: Cursor) -> AbstractContextManager[Iterator[StepBatch]]:
        """This rank's batches from a cursor to the end of the last epoch."""
        return stream(self.source, self.settings, start=start)

    def held_out(self) -> AbstractContextManager[Iterator[StepBatch]]:
        """This rank's batches of the rows nothing is learned from."""
        return eval_stream(self.held_out_source, self.settings)
