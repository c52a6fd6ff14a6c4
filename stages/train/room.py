"""Halves micro-batches after an out-of-memory error, and remembers the size that fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...schemas.batches import MicroBatch
from ...schemas.errors import MemoryLimitError
from ..model.live_memory import is_out_of_memory


class NoRoom(Exception):  # noqa: N818 - a request to try again with less
    """Memory ran out while a micro-batch was run."""

    def __init__(self, micro: MicroBatch) -> None:
        super().__init__()
        self.micro = micro


@contextmanager
def needing_room(micro: MicroBatch) -> Iterator[None]:
    """Raises NoRoom where torch says that there is no memory left."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise NoRoom(micro) from error


@dataclass
class Room:
    """The largest micro-batches that fit, once memory has run out."""

    pads: bool  # whether a micro-batch is padded to its longest row
    ranks: int = 1
    sharing: int = 1  # ranks that share a micro-batch; what fits is counted per rank
    advice: tuple[str, ...] = ()  # what takes less memory and is not in use yet
    budget: int = 0  # tokens; 0: as planned
    times: int = 0  # that memory ran out

    def shrink(self, micro: MicroBatch) -> None:
        """Allows half of what did not fit; a row that is alone cannot be cut."""
        sizes = [tree.num_tokens for tree in micro.trees]
        if len(sizes) < 2:
            raise MemoryLimitError(self._too_long(micro))
        tokens = len(sizes) * max(sizes) if self.pads else sum(sizes)
        self.budget, self.times = max(1, tokens // 2 // self.sharing), self.times + 1

    def require_alone(self) -> None:
        """Ends a run of several ranks: the others wait where this one will not come any more."""
        if self.ranks > 1:
            raise MemoryLimitError(
                "Memory ran out on this rank while the others waited for it in the same step, "
                "which it cannot repeat by itself. The step changed nothing. Start all ranks again "
                f"with --resume auto: the run has noted to use --tokens-per-batch {self.budget:,}, "
                f"and its result stays the same. {self._less()}"
            )

    def no_update(self) -> str:
        """The message where memory runs out in an update."""
        return (
            "Memory ran out while the weights were updated: smaller micro-batches do not help. "
            f"The update may be half made, so the run ends here. {self._less()} Then start again "
            "with --resume auto."
        )

    def _too_long(self, micro: MicroBatch) -> str:
        if not micro.trees:
            what = "not even an empty micro-batch fits into memory"
        else:
            tokens = micro.trees[0].num_tokens
            what = f"row {micro.row_ids[0]} alone, {tokens:,} tokens, does not fit into memory"
        return f"Memory ran out: {what}. {self._less()} Then start again with --resume auto."

    def _less(self) -> str:
        if not self.advice:
            return "Use a smaller model, more memory, or a cache with a shorter tokens.max_length."
        return f"What takes less: {'; '.join(self.advice)}."


def give_back() -> None:
    """Gives the memory that torch keeps for later back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
