"""ZeRO-3: the configuration by which transformers loads a policy in parts."""

from __future__ import annotations

import logging
from typing import Any

from ...schemas.batches import World
from ...schemas.train_options import TrainOptions
from .deepspeed_config import EngineContext, engine_config

logger = logging.getLogger("align")

# Keys of a user's file under which parameters are stored in a form that only DeepSpeed writes.
OWN_FORMS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")


def loading_config(
    options: TrainOptions, world: World, found: EngineContext
) -> dict[str, Any] | None:
    """DeepSpeed's configuration for loading in parts; None if the engine partitions a whole model.

    It is also None under any other stage.
    """
    config = engine_config(options, found)
    zero = config.get("zero_optimization", {})
    if zero.get("stage") != 3:
        return None
    reasons = [f"{name} packs it" for name in OWN_FORMS if zero.get(name)]
    if zero.get("offload_param", {}).get("device") == "nvme":
        reasons.append("offload_param keeps it on NVMe")
    if reasons and world.rank == 0:
        logger.info("The policy is loaded whole on every rank, then sharded: %s.", reasons[0])
    return None if reasons else config
