"""One reference with its weights on all ranks: rank zero makes the cache, the others help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...schemas.batches import World
from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.rows import OutOfMemory, Tree
from ...stages.engine.distributed import (
    joined_world,
    naming_lost_peers,
    run_on_all_ranks,
    run_on_rank_zero,
)
from ...stages.model.reference import HfReference, TreeScorer, on_threads
from ...stages.storage.disk.digest_memory import own_digests
from ...stages.tracking.progress import Progress
from .early_opening import OpenedBy
from .precompute import precompute


@dataclass(frozen=True)
class ScoreOrder:
    """An order that rank zero broadcasts; the empty one ends the loop."""

    opens: bool = False
    threads: int = 0  # of a sum
    trees: tuple[Tree, ...] = ()  # to score; none, and nothing to open: it is done


def precompute_in_parallel(config: Config, *, progress: Progress, shows_row: bool = False) -> str:
    """Makes the cache on rank zero and sums it up; the others hold their part until it is made."""
    with joined_world() as world, naming_lost_peers(world):
        _require_ranks(config, world)
        reference = HfReference(config.model, own_digests())
        if world.rank:
            _follow(reference, world)
            return ""
        with _leading(reference, world) as leader:
            made = precompute(config, leader, progress=progress, shows_row=shows_row)
            return made.text()


def _require_ranks(config: Config, world: World) -> None:
    if config.scoring.executor != "inline":
        raise UsageError(
            f"--executor {config.scoring.executor}: the ranks that hold a reference together score "
            "every unit themselves. Leave it out, or set model.tensor_parallel to 1."
        )
    if config.model.tensor_parallel != world.size:
        raise UsageError(
            f"model.tensor_parallel is {config.model.tensor_parallel}, and {world.size} ranks were "
            "started. Start as many ranks with torchrun as are to hold the reference together."
        )


def _follow(reference: HfReference, world: World) -> None:
    """Runs the orders that rank zero broadcasts, until the empty one."""
    scorer: TreeScorer | None = None
    while (order := _broadcast(world, ScoreOrder())) != ScoreOrder():
        if order.opens:
            scorer = _opened(reference, world)
            continue
        assert scorer is not None, "rank zero opens the reference before it scores"
        with on_threads(order.threads):
            scorer.score(order.trees)


def _broadcast(world: World, order: ScoreOrder) -> ScoreOrder:
    """Broadcasts rank zero's order; returns it on every rank."""
    return run_on_rank_zero(world, lambda: order)


def _opened(reference: HfReference, world: World) -> TreeScorer:
    model = run_on_all_ranks(world, reference.load)
    return reference.scorer_of(model)


@contextmanager
def _leading(reference: HfReference, world: World) -> Iterator[OpenedBy]:
    """The `Reference` of rank zero."""

    def opened() -> LeadingScorer:
        _broadcast(world, ScoreOrder(opens=True))
        return LeadingScorer(_opened(reference, world), world)

    try:
        yield OpenedBy(reference, opened)
    except RuntimeError:  # of a collective: no other rank would receive the end
        raise
    except BaseException:
        _broadcast(world, ScoreOrder())
        raise
    else:
        _broadcast(world, ScoreOrder())


class LeadingScorer:
    """The `Scorer` of rank zero."""

    def __init__(self, scorer: TreeScorer, world: World) -> None:
        self._scorer = scorer
        self._world = world

    @property
    def pads(self) -> bool:
        """Whether every tree of a batch takes as many tokens as the longest of them."""
        return self._scorer.pads

    def launch(self, trees: Sequence[Tree]) -> Callable[[], NDArray[np.float32]]:
        """Scores a batch at once: the ranks take the next order when they have done this one."""
        logps = self.score(trees)
        return lambda: logps

    def score(self, trees: Sequence[Tree]) -> NDArray[np.float32]:
        """Log p of every completion token, by all ranks together."""
        _broadcast(self._world, ScoreOrder(threads=torch.get_num_threads(), trees=tuple(trees)))
        try:
            return self._scorer.score(trees)
        except OutOfMemory as error:
            # The others are in the middle of this batch and cannot begin a smaller one.
            raise UsageError(
                f"{error}, and ranks that hold a reference together cannot begin a smaller batch. "
                "Lower --tokens-per-batch, then run the same command again: what is scored is kept."
            ) from error

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Refused: weights that lie on several ranks are not widened."""
        raise OutOfMemory("a reference on several ranks is not widened to float32")
        yield

    def describe(self) -> Mapping[str, str]:
        """The scoring path of rank zero, which all ranks take."""
        return self._scorer.describe()
