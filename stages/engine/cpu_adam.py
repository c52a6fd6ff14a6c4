"""DeepSpeed's CPU AdamW for offloaded states, which is compiled at the first start."""

from __future__ import annotations

import logging

from ...schemas.batches import World
from .deepspeed_compat import load_cpu_adam, quietly
from .distributed import gathered

logger = logging.getLogger("align")


def has_cpu_adam(world: World) -> bool:
    """Whether every rank could load CPU AdamW; if not, the log says why and what is used."""
    if world.rank == 0:
        logger.info(
            "The optimizer's state is in the CPU's memory: compiling DeepSpeed's AdamW for the "
            "CPU, which takes about a minute the first time."
        )
    failures = [one for one in gathered(world, _failure()) if one]
    if failures and world.rank == 0:
        logger.warning(
            "DeepSpeed's AdamW for the CPU cannot be compiled (%s): torch's is used instead, which "
            "is slower. To have it, install a C++ compiler and ninja.",
            failures[0],
        )
    return not failures


def _failure() -> str:
    try:
        with quietly():
            load_cpu_adam()
    # Compilers fail with many kinds of exceptions; the reason is reported.
    except Exception as error:
        return str(error).partition(":")[0].partition("\n")[0] or type(error).__name__
    return ""
