"""One optimizer step of DeepSpeed: applied on every rank, or on none and without a trace."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...schemas.batches import Update
from .quiet import deepspeed

_WRAPPER = deepspeed.runtime.base_optimizer.DeepSpeedOptimizer
_STAGE_1_AND_2 = deepspeed.runtime.zero.stage_1_and_2


def update(engine: Any) -> Update:
    """Clips to the configured norm and updates, unless a gradient is not finite on any rank."""
    wrapped = isinstance(engine.optimizer, _WRAPPER)
    if not wrapped and not math.isfinite(norm := _norm(engine)):
        clear(engine)
        return Update(applied=False, grad_norm=norm)
    engine.step()
    if wrapped:
        norm = float(engine.get_global_grad_norm())
    applied = bool(engine.was_step_applied())
    if not applied:
        clear(engine)
    return Update(applied=applied, grad_norm=norm)


def clear(engine: Any) -> None:
    """Forgets every gradient, those already reduced to their owners included."""
    optimizer = engine.optimizer
    engine.zero_grad()
    optimizer.zero_grad(set_to_none=True)
    if isinstance(optimizer, _STAGE_1_AND_2.DeepSpeedZeroOptimizer):
        _clear_partitions(optimizer)


def _norm(engine: Any) -> float:
    """Without ZeRO and in float32 DeepSpeed updates with whatever it is given, NaN included."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    # The gradients are reduced already, so every rank comes to the same number.
    return float(torch.nn.utils.get_total_norm(gradients))


def _clear_partitions(optimizer: Any) -> None:
    """What DeepSpeed does after an overflow; stage 2 accumulates here, not in the parameters."""
    optimizer._release_preflattened_grad_buffers()
    for group in optimizer.averaged_gradients:
        optimizer.averaged_gradients[group] = None
    for group in optimizer.all_grad_tensors:
        optimizer.all_grad_tensors[group] = None
    optimizer.micro_step_id = _STAGE_1_AND_2.INITIAL_MICRO_STEP_ID
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()
