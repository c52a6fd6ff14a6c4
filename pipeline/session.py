"""What a run holds while it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..schemas.batches import Engine, World
    from ..stages.feed.loader import CacheFeed
    from ..stages.feed.train_source import TrainSource
    from ..stages.methods.recipe import Recipe
    from ..stages.model.policy import Policy
    from .training_job import TrainingJob


@dataclass(frozen=True)
class Session:
    """One rank's hold on the run: the policy, where its rows come from, what it learns."""

    job: TrainingJob
    world: World
    policy: Policy
    engine: Engine
    engine_config: dict[str, Any]  # DeepSpeed's, resolved
    source: TrainSource
    recipe: Recipe
    feed: CacheFeed
