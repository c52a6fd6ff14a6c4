"""The DeepSpeed configuration of a run: one of our presets, or the user's own file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...schemas.errors import UsageError
from .user_file import filled, stage_of

if TYPE_CHECKING:
    from ...schemas.config import TrainOptions

PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero3-offload")
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
LARGEST_FILE = 1_048_576
SMALLEST_BUCKET = 1_000_000


@dataclass(frozen=True)
class Circumstances:
    """What a configuration depends on beside the options."""

    dtype: str  # of the policy: float32, bfloat16 or float16
    hidden_size: int
    world_size: int


def engine_config(options: TrainOptions, circumstances: Circumstances) -> dict[str, Any]:
    """What `deepspeed.initialize` is given; every value that is ours to decide stands in it."""
    ours = _ours(options, circumstances)
    if (preset := _chosen(options.deepspeed, circumstances)) in PRESETS:
        config = _preset(preset, ours, circumstances)
    else:
        theirs = _read(options.deepspeed)
        config = filled(theirs, ours, place=options.deepspeed, batch_size=options.batch_size)
    if circumstances.dtype == "float16" and not stage_of(config):
        # DeepSpeed divides by the loss scale there, but does not multiply by it.
        raise UsageError(
            f"{options.deepspeed}: float16 is not trained rightly without ZeRO. "
            "Use zero1, or set train.dtype to bfloat16."
        )
    return config


def _ours(options: TrainOptions, circumstances: Circumstances) -> dict[str, Any]:
    """The part that our own options decide, whichever way the policy is spread."""
    hidden_size = circumstances.hidden_size
    config: dict[str, Any] = {
        # How many micro-batches a step has differs from step to step, and the losses are shares
        # of a global mean already: DeepSpeed shall divide by nothing but the number of ranks.
        "train_batch_size": circumstances.world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": _adamw(options)},
        "zero_optimization": {
            "reduce_bucket_size": max(hidden_size**2, SMALLEST_BUCKET),
            "stage3_prefetch_bucket_size": int(0.9 * max(hidden_size**2, SMALLEST_BUCKET)),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        },
    }
    for dtype, name in PRECISIONS.items():
        config[name] = {"enabled": dtype == circumstances.dtype}
    return config


def _adamw(options: TrainOptions) -> dict[str, Any]:
    return {
        "lr": options.lr,
        "betas": [options.beta1, options.beta2],
        "eps": options.epsilon,
        "weight_decay": options.weight_decay,
        # DeepSpeed's own kernels are compiled at the first start, which needs a compiler.
        "torch_adam": True,
    }


def _chosen(deepspeed: str, circumstances: Circumstances) -> str:
    if deepspeed != "auto":
        return deepspeed
    # Weights in 16 bits need the copy in 32 that ZeRO keeps, and one rank has no other use for it.
    alone = circumstances.world_size == 1 and circumstances.dtype == "float32"
    return "zero0" if alone else "zero1"


def _preset(name: str, ours: dict[str, Any], circumstances: Circumstances) -> dict[str, Any]:
    stage = int(name.removeprefix("zero")[0])
    zero = {"stage": stage} | (ours["zero_optimization"] if stage else {})
    if stage and stage < 3:
        zero = {key: value for key, value in zero.items() if not key.startswith("stage3")}
    if name == "zero3-offload":
        place = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        zero |= {"offload_optimizer": place, "offload_param": dict(place)}
    config = ours | {"zero_optimization": zero}
    if circumstances.dtype == "float16":
        # Its search begins so high that the first steps of any run would be lost to it, and every
        # one of them counts as a step that was not finite.
        config["fp16"] = ours["fp16"] | {"initial_scale_power": 12, "hysteresis": 1}
    if stage and circumstances.dtype in PRECISIONS:
        # In 16 bits the sum would depend on how a step is cut into micro-batches.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"train.deepspeed is {name!r}: {_no_such(name)}")
    if path.stat().st_size > LARGEST_FILE:
        raise UsageError(f"{path}: larger than {LARGEST_FILE:,} bytes; no DeepSpeed config.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not readable as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: expected a JSON object, found {config!r:.60}.")
    return config


def _no_such(name: str) -> str:
    nearest = get_close_matches(name, ("auto", *PRESETS), n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    return f"neither auto nor one of {', '.join(PRESETS)} nor a file.{hint}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two equal keys JSON would silently keep the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {max(keys, key=keys.count)!r} stands twice")
    return content
