"""Memory of a training: its peak, and smaller micro-batches after it ran out."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ...schemas.batches import MicroBatch
from ...schemas.errors import MemoryLimitError
from ..model.library_errors import is_out_of_memory
from ..model.path_search import explaining_compile_errors

REMEDY = (
    "`align plan` names settings that take less: set gradient checkpointing with --resume auto, "
    "others in a new --output."
)


class MicroBatchTooLarge(Exception):  # noqa: N818 - a request to try again with less
    """Out of memory while a micro-batch was run."""

    def __init__(self, micro: MicroBatch) -> None:
        super().__init__()
        self.micro = micro


@contextmanager
def catching_out_of_memory(micro: MicroBatch) -> Iterator[None]:
    """Raises MicroBatchTooLarge instead of torch's out-of-memory error."""
    try:
        with explaining_compile_errors():  # a backward pass may compile its graph
            yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MicroBatchTooLarge(micro) from error


@dataclass
class MemoryBackoff:
    """The token budget of micro-batches, halved each time memory runs out."""

    pads: bool  # whether a micro-batch is padded to its longest row
    ranks: int = 1
    remedy: str = REMEDY
    budget: int = 0  # tokens; 0: as planned
    times: int = 0  # how often memory ran out in this process

    def shrink(self, micro: MicroBatch) -> None:
        """Halves the tokens of the micro-batch that did not fit; an error for a single row."""
        sizes = [tree.num_tokens for tree in micro.trees]
        if len(sizes) < 2:
            raise MemoryLimitError(self._too_long(micro))
        tokens = len(sizes) * max(sizes) if self.pads else sum(sizes)
        self.budget, self.times = max(1, tokens // 2), self.times + 1

    def require_alone(self) -> None:
        """Ends a run of several ranks, because the others wait in a collective call."""
        if self.ranks > 1:
            raise MemoryLimitError(
                "Memory ran out on this rank, which cannot repeat the step without the others. The "
                "step changed nothing. Start all ranks again with --resume auto "
                f"--tokens-per-batch {self.budget}: the result stays the same."
            )

    def no_update(self) -> str:
        """The message for running out of memory in an update."""
        return (
            "Memory ran out during the update of the weights, which may be incomplete, so the run "
            f"ends. Smaller micro-batches do not help. {self.remedy}"
        )

    def _too_long(self, micro: MicroBatch) -> str:
        if not micro.trees:
            what = "not even an empty micro-batch fits"
        else:
            tokens = micro.trees[0].num_tokens
            what = f"row {micro.row_ids[0]} alone, {tokens:,} tokens, does not fit"
        return f"Memory ran out: {what}. {self.remedy}"


STATUS = Path("/proc/self/status")


def forget_peak() -> None:
    """Resets the peak memory counters, if the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Peak memory in MiB: of tensors on a GPU, of the process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    with suppress(OSError):
        for line in STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    # Only a fallback, because a forked process starts with its parent's peak.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
