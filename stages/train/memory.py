"""Memory of a training: its peak, and smaller micro-batches where it ran out."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ...schemas.batches import MicroBatch
from ...schemas.errors import MemoryLimitError
from ..model.library_errors import is_out_of_memory
from ..model.path_search import explaining_compile_errors


class MicroBatchTooLarge(Exception):  # noqa: N818 - a request to try again with less
    """Out of memory while a micro-batch was run."""

    def __init__(self, micro: MicroBatch) -> None:
        super().__init__()
        self.micro = micro


@contextmanager
def catching_out_of_memory(micro: MicroBatch) -> Iterator[None]:
    """Raises MicroBatchTooLarge instead of torch's out-of-memory error."""
    try:
        with (
            explaining_compile_errors()
        ):  # a graph for learning may be compiled in its backward pass
            yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MicroBatchTooLarge(micro) from error


@dataclass
class MemoryBackoff:
    """The token budget of micro-batches that fit, halved each time memory runs out."""

    pads: bool  # whether a micro-batch is padded to its longest row
    ranks: int = 1
    advice: Callable[[], Iterable[str]] = tuple  # settings that take less and are not in use yet
    budget: int = 0  # tokens; 0: as planned
    times: int = 0  # that memory ran out since this process began

    def shrink(self, micro: MicroBatch) -> None:
        """Halves the tokens of the micro-batch that did not fit; a single row cannot be cut."""
        sizes = [tree.num_tokens for tree in micro.trees]
        if len(sizes) < 2:
            raise MemoryLimitError(self._too_long(micro))
        tokens = len(sizes) * max(sizes) if self.pads else sum(sizes)
        self.budget, self.times = max(1, tokens // 2), self.times + 1

    def require_alone(self) -> None:
        """Ends a run of several ranks: the others wait in a collective that this one has left."""
        if self.ranks > 1:
            raise MemoryLimitError(
                "Memory ran out on this rank while the others waited for it in the same step, "
                "which it cannot repeat by itself. The step changed nothing. Start all ranks again "
                f"with --resume auto --tokens-per-batch {self.budget}: the result stays the same. "
                f"{self._less()}"
            )

    def no_update(self) -> str:
        """The message for out of memory in an update."""
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
        return f"What takes less: {'; '.join(self.advice())}."


STATUS = Path("/proc/self/status")


def forget_peak() -> None:
    """Resets the peak memory counters, if the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Peak memory: of tensors on a GPU, of the process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    with suppress(OSError):
        for line in STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    # Only a fallback: a forked process begins with its parent's peak.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
