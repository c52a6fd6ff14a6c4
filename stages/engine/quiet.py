"""DeepSpeed without its own voice and its detours: whoever needs it imports it from here."""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
import warnings
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# Left to itself DeepSpeed looks for an accelerator, and says on stdout what it found.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Fails to import a module inside, unless it is loaded already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


# Its autotuner, which nothing here runs, would load MLflow: seconds and a hundred MiB.
with warnings.catch_warnings(), _without("mlflow"):
    warnings.simplefilter("ignore")
    import deepspeed as _deepspeed
    from deepspeed.utils import numa as _numa

deepspeed: Any = _deepspeed
# It would spend a minute with the C++ compiler on a faster all-reduce before the first step.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# Without a GPU, ZeRO-3 would start `numactl` in every backward pass.
_numa.get_numa_cores = functools.cache(_numa.get_numa_cores)
# It still calls collectives by the names that torch has begun to replace.
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
_logger = logging.getLogger("DeepSpeed")
_logger.setLevel(logging.ERROR)
for _handler in _logger.handlers:
    if isinstance(_handler, logging.StreamHandler):
        _handler.setStream(sys.stderr)


@contextmanager
def quietly() -> Iterator[None]:
    """Drops what DeepSpeed prints and warns of; stdout belongs to the command's answer."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
