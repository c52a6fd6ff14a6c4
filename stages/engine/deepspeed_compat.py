"""Imports DeepSpeed without its log lines and slow paths; only this file uses its internals."""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import torch
from torch import Tensor

# Otherwise DeepSpeed detects an accelerator at import and prints it; it reads this once.
_is_named = "DS_ACCELERATOR" in os.environ
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
# Its unused autotuner would load MLflow, which takes seconds and a hundred MiB.
sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed as _deepspeed
        from deepspeed.utils import numa as _numa
finally:
    if sys.modules["mlflow"] is None:
        del sys.modules["mlflow"]
    if not _is_named:
        del os.environ["DS_ACCELERATOR"]

deepspeed: Any = _deepspeed
# Otherwise it compiles a faster all-reduce for a minute before the first step.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# Without a GPU, ZeRO-3 would start `numactl` in every backward pass.
_numa.get_numa_cores = functools.cache(_numa.get_numa_cores)

_RUNTIME = deepspeed.runtime
_STAGE_1_AND_2 = _RUNTIME.zero.stage_1_and_2
CONFIG_ERROR = _RUNTIME.config.DeepSpeedConfigError
# This one clips, scales the loss and skips steps by itself, unlike torch's optimizers.
WRAPPED_OPTIMIZER = _RUNTIME.base_optimizer.DeepSpeedOptimizer
_STAGES = _RUNTIME.zero.config.ZeroStageEnum
# Python 3.11.0 to 3.11.3 pickle its members as calls of getattr, which no safe loader takes.
_STAGES.__reduce_ex__ = lambda stage, protocol: (_STAGES, (stage.value,))
# Types in the files of its state besides tensors, numbers and containers.
STATE_TYPES = (
    _RUNTIME.fp16.loss_scaler.LossScaler,
    _RUNTIME.fp16.loss_scaler.DynamicLossScaler,
    _STAGES,
    deepspeed.utils.fragment_address,
)


def load_cpu_adam() -> None:
    """Loads DeepSpeed's CPU AdamW, compiling it if it was not compiled earlier."""
    deepspeed.ops.op_builder.CPUAdamBuilder().load(verbose=False)


@contextmanager
def while_training() -> Iterator[None]:
    """Silences the log lines of every step in the block, and sends other lines to stderr."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    # DeepSpeed's own handlers; those of another type belong to the host program.
    streams = [one for one in logger.handlers if type(one) is logging.StreamHandler]
    with warnings.catch_warnings():
        # DeepSpeed still calls collectives by names that torch has deprecated.
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
        logger.setLevel(logging.ERROR)
        before = [one.setStream(sys.stderr) for one in streams]
        try:
            yield
        finally:
            logger.setLevel(level)
            for handler, stream in zip(streams, before, strict=True):
                if stream is not None:
                    handler.setStream(stream)


@contextmanager
def quietly() -> Iterator[None]:
    """Drops DeepSpeed's prints and warnings in the block; stdout is for the command's result."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def forget_first_step(engine: Any) -> None:
    """Clears the optimizer state after the step without gradients of 16-bit DeepSpeed, ZeRO 0."""
    if isinstance(engine.optimizer, _RUNTIME.fp16.unfused_optimizer.FP16_UnfusedOptimizer):
        engine.optimizer.optimizer.state.clear()


def clear_partitions(optimizer: Any) -> None:
    """Clears ZeRO 1 and 2's accumulated gradients, as DeepSpeed does after an overflow."""
    if not isinstance(optimizer, _STAGE_1_AND_2.DeepSpeedZeroOptimizer):
        return
    optimizer._release_preflattened_grad_buffers()
    for group in optimizer.averaged_gradients:
        optimizer.averaged_gradients[group] = None
    for group in optimizer.all_grad_tensors:
        optimizer.all_grad_tensors[group] = None
    optimizer.micro_step_id = _STAGE_1_AND_2.INITIAL_MICRO_STEP_ID
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()


def forget_passes(optimizer: Any) -> None:
    """Resets the ZeRO state after an interrupted forward or backward pass."""
    if not isinstance(optimizer, _RUNTIME.base_optimizer.ZeROOptimizer):
        return
    hooks = optimizer._backward_hook_state
    hooks.backward_active_depth = hooks.remaining_grad_acc_hooks = 0
    hooks.reset_for_new_step()
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        # ZeRO-3's buffer stays, because it is made only once.
        getattr(bucket, "clear_params", bucket.clear)()
    if isinstance(optimizer, _STAGE_1_AND_2.DeepSpeedZeroOptimizer):
        optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
        optimizer.extra_large_param_to_reduce.clear()
        optimizer.ready_for_gradients = False  # otherwise the next pass is not counted
    elif offload := getattr(optimizer, "parameter_offload", None):
        optimizer.params_already_reduced = dict.fromkeys(optimizer.params_already_reduced, False)
        coordinator = offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
        offload.partition_all_parameters()


@contextmanager
def state_written_by(engine: Any, write: Callable[[Any, str], None]) -> Iterator[None]:
    """Makes the engine write its state by `write` in the block, without a recovery script."""
    engine.checkpoint_engine.save = write
    engine._copy_recovery_script = lambda path: None
    try:
        yield
    finally:
        del engine.checkpoint_engine.save, engine._copy_recovery_script


def gathered_weight(tensor: Tensor) -> Any:
    """Gathers on every rank, in the block, a tensor that ZeRO-3 may have partitioned."""
    is_partitioned = hasattr(tensor, "ds_id")
    return deepspeed.zero.GatheredParameters([tensor]) if is_partitioned else nullcontext()


def whole_numel(tensor: Tensor) -> int:
    """The number of elements of the unsharded tensor, which ZeRO-3 may have partitioned."""
    return int(getattr(tensor, "ds_numel", tensor.numel()))


def whole_ndim(tensor: Tensor) -> int:
    """The number of dimensions of the unsharded tensor; a partition of ZeRO-3 has one."""
    return len(getattr(tensor, "ds_shape", tensor.shape))


def shapes_of_groups(engine: Any) -> list[dict[str, torch.Size]]:
    """Shapes of trained parameters by name, a dict per flat tensor of the engine's ZeRO stage."""
    shapes: list[dict[str, torch.Size]] = engine._get_zero_param_shapes()
    return shapes


def replace_optimizer_state(engine: Any, state: dict[str, Any]) -> None:
    """Loads this rank's state into the optimizer of ZeRO 1 to 3, as DeepSpeed's loader does."""
    is_sharded = engine.zero_optimization_stage() == 3
    if is_sharded:  # every parameter must be partitioned while its shard is replaced
        engine.optimizer.checkpoint_event_prologue()
    engine.optimizer.load_state_dict({engine.global_rank: state}, load_from_fp32_weights=True)
    if is_sharded:
        engine.optimizer.checkpoint_event_epilogue()
