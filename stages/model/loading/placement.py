"""Placement of a model's weights: on a device or on several."""

from __future__ import annotations

import os
from typing import Any

import torch

from ....schemas.config import ModelOptions
from ....schemas.errors import UsageError


def placement(options: ModelOptions) -> dict[str, Any]:
    """transformers' arguments for weights on more than one device; empty for one."""
    if not options.device_map:
        return {}
    # Models on several devices import DeepSpeed, which prints the accelerator that it finds itself.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    return {"device_map": options.device_map}


def chosen_device(options: ModelOptions) -> str:
    """cpu or cuda, `auto` resolved."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("model.device is cuda, but torch finds no GPU here. Set it to auto.")
    if options.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return options.device


def device_bytes(device: str) -> int:
    """The memory of this process' GPU; 0 for a CPU, whose memory is not this process' alone."""
    if device != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def without_cudnn_attention() -> None:
    """Disables cuDNN's attention kernels in favour of torch's others.

    cuDNN plans each new batch shape on the CPU: with lengths that differ from batch to batch that
    took three quarters of a training step on an H100.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def rank_device(device: str) -> str:
    """The device of this rank: under a launcher every rank of a machine has its own GPU."""
    # A rank of stage 1 never meets the others: it knows what srun says, and has no LOCAL_RANK.
    of_srun = os.environ.get("SLURM_LOCALID", "") if "SLURM_STEP_ID" in os.environ else ""
    rank = os.environ.get("LOCAL_RANK", of_srun)
    if device != "cuda" or not rank.isdigit():
        return device
    return f"cuda:{int(rank) % torch.cuda.device_count()}"
