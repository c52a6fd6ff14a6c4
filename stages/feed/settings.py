"""What decides which rows make a step, and what decides only where they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ...schemas.batches import World


@dataclass(frozen=True)
class FeedSettings:
    """How a source is cut into steps; the last three lines change no result."""

    seed: int
    epochs: int
    batch_size: int  # rows per step, over all ranks
    kl_use: Literal["rotate", "all"]  # of a completion's partners: one per epoch in turn, or all
    kl_per_step: int  # most mismatched branches in a step; 0: no limit
    limit_train_batches: int  # steps per epoch at most; 0: no limit
    limit_eval_batches: int  # steps per evaluation at most; 0: no limit
    tokens_per_batch: int  # most tokens in a micro-batch
    pads: bool  # whether a micro-batch is padded to its longest row
    world: World
