"""The DeepSpeed configuration of a run: one of align's presets, or the user's file."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...schemas.batches import World
from ...schemas.errors import UsageError, closest, did_you_mean
from ...schemas.train_options import TrainOptions

logger = logging.getLogger("align")


@dataclass(frozen=True)
class Preset:
    """A ZeRO stage, with what it offloads to the CPU's memory."""

    stage: int
    offloads: tuple[str, ...] = ()  # by DeepSpeed's names


PRESETS = {
    "zero0": Preset(0),
    "zero1": Preset(1),
    "zero2": Preset(2),
    "zero2-offload": Preset(2, ("offload_optimizer",)),
    "zero3": Preset(3),
    "zero3-offload": Preset(3, ("offload_optimizer", "offload_param")),
}


def preset_of(stage: int, *, offloads: bool) -> str:
    """The preset of a ZeRO stage, with the optimizer on the CPU or not."""
    wanted = max(stage, 2) if offloads else stage
    return next(
        name
        for name, preset in PRESETS.items()
        if preset.stage == wanted and bool(preset.offloads) == offloads
    )


# The type of each `train.optimizer` in DeepSpeed's configuration.
TYPES = {"adamw": "AdamW", "adamw8bit": "align.AdamW8bit"}
# State values per element, each as large as a master weight; only a file can name lion.
_STATES = {"adam": 2.0, "adamw": 2.0, "lion": 1.0, "align.adamw8bit": 0.5}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
# Keys of a user's file that store parameters in a form that only DeepSpeed writes.
OWN_FORMS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
SMALLEST_BUCKET = 1_000_000


@dataclass(frozen=True)
class EngineContext:
    """The values, beside the options, that decide a configuration."""

    dtype: str  # of the policy: float32, bfloat16 or float16
    hidden_size: int
    world_size: int
    device: str = "cpu"  # cpu or cuda


def engine_config(options: TrainOptions, context: EngineContext) -> dict[str, Any]:
    """The config for `deepspeed.initialize`, with every value that align's options decide."""
    name, dtype = options.deepspeed, context.dtype
    if name == "auto":
        # 16-bit weights need float32 master weights, which ZeRO keeps; one float32 rank needs none.
        name = "zero0" if context.world_size == 1 and dtype == "float32" else "zero1"
    ours = _ours(options, context)
    theirs: dict[str, Any] = {}
    if preset := PRESETS.get(name):
        config = _preset(preset, ours, context)
    else:
        theirs = _read(name)
        config = filled(theirs, ours, source=name, batch_size=options.batch_size)
    if "optimizer" not in theirs:
        block = config["optimizer"]
        offloads = offloads_optimizer(config)
        if block["type"] == "AdamW" and not (context.device == "cuda" and offloads):
            # DeepSpeed's own kernels need a compiler at the first start, which is only worth it for
            # the AdamW of states in the CPU's memory.
            torchs = {"torch_adam": True, **({"fused": True} if context.device == "cuda" else {})}
            config["optimizer"] = block | {"params": block["params"] | torchs}
    stage = stage_of(config)
    if options.optimizer_dtype != "float32" and dtype != "bfloat16":
        raise UsageError(
            f"train.optimizer_dtype is bfloat16, but the policy is trained in {dtype}. Set "
            "train.dtype to bfloat16, or train.optimizer_dtype to float32."
        )
    if options.optimizer_dtype != "float32" and stage < 2:
        # In these stages DeepSpeed silently keeps them in float32, or fails.
        raise UsageError(
            f"train.optimizer_dtype is bfloat16, but train.deepspeed={options.deepspeed} is ZeRO "
            f"{stage}, which keeps master weights in float32. Use --deepspeed zero2 or zero3."
        )
    if dtype == "float16" and not stage:
        # In this stage DeepSpeed divides by the loss scale, but does not multiply by it.
        raise UsageError(
            f"{options.deepspeed}: float16 needs ZeRO. Use zero1, or set train.dtype to bfloat16."
        )
    return config


def loading_config(
    options: TrainOptions, world: World, context: EngineContext
) -> dict[str, Any] | None:
    """The config for loading a policy sharded under ZeRO-3.

    None in any other stage, and if the engine must partition a fully loaded model.
    """
    config = engine_config(options, context)
    if stage_of(config) != 3:
        return None
    zero = config["zero_optimization"]
    reasons = [f"{name} packs it" for name in OWN_FORMS if zero.get(name)]
    if zero.get("offload_param", {}).get("device") == "nvme":
        reasons.append("offload_param keeps it on NVMe")
    if reasons and world.rank == 0:
        logger.info("The policy is loaded on every rank, then sharded: %s.", reasons[0])
    return None if reasons else config


def _ours(options: TrainOptions, context: EngineContext) -> dict[str, Any]:
    """The part of the configuration that align's options decide in every ZeRO stage."""
    hidden_size = context.hidden_size
    config: dict[str, Any] = {
        # The losses are already parts of a global mean, and the number of micro-batches changes
        # from step to step: DeepSpeed must only divide by the number of ranks.
        "train_batch_size": context.world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.max_grad_norm,
        "optimizer": {
            "type": TYPES[options.optimizer],
            "params": {
                "lr": options.lr,
                "betas": [options.beta1, options.beta2],
                "eps": options.epsilon,
                "weight_decay": options.weight_decay,
            },
        },
        "zero_optimization": {
            "reduce_bucket_size": max(hidden_size**2, SMALLEST_BUCKET),
            "stage3_prefetch_bucket_size": int(0.9 * max(hidden_size**2, SMALLEST_BUCKET)),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        },
    }
    if options.optimizer == "adamw8bit":
        # DeepSpeed tests its own optimizers only.
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    for dtype, name in PRECISIONS.items():
        config[name] = {"enabled": dtype == context.dtype}
    if options.optimizer_dtype == "bfloat16":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return config


def _preset(preset: Preset, ours: dict[str, Any], context: EngineContext) -> dict[str, Any]:
    stage = preset.stage
    zero = {"stage": stage} | (ours["zero_optimization"] if stage else {})
    if stage and stage < 3:
        zero = {key: value for key, value in zero.items() if not key.startswith("stage3")}
    in_memory = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    zero |= {name: dict(in_memory) for name in preset.offloads}
    config = ours | {"zero_optimization": zero}
    if context.dtype == "float16":
        # With the default initial loss scale, the first steps of any run overflow, and each counts
        # as a step that is not finite.
        config["fp16"] = ours["fp16"] | {"initial_scale_power": 12, "hysteresis": 1}
    if stage and context.dtype in PRECISIONS:
        # In 16 bits the sum would depend on the micro-batches of a step.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    if not path.is_file():
        hint = did_you_mean(closest(name, ("auto", *PRESETS)))
        raise UsageError(
            f"train.deepspeed is {name!r}. Use auto, one of {', '.join(PRESETS)}, or a JSON file."
            f"{hint}"
        )
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable as JSON ({error}). Correct the file.") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: must hold one JSON object.")
    return config


AUTO = "auto"
# Blocks that are refused with any content, and the reason.
REFUSED = {
    "scheduler": "train.schedule, train.warmup and train.min_lr decide the learning rate",
    "elasticity": "not supported; start again with --resume auto",
    "amp": "NVIDIA apex is not supported; use train.dtype",
    "torch_autocast": "train.dtype decides the precision",
    "tensor_parallel": "every rank gets rows of its own",
    "pipeline": "every rank gets rows of its own",
    "sequence_parallel_size": "every rank gets rows of its own",
    "managed_gradient_accumulation": "the number of micro-batches changes from step to step",
}
OPTION_OF = {
    "gradient_clipping": "train.max_grad_norm",
    "optimizer.params.lr": "train.lr",
    "optimizer.params.betas": "train.beta1, train.beta2",
    "optimizer.params.eps": "train.epsilon",
    "optimizer.params.weight_decay": "train.weight_decay",
    "bf16.enabled": "train.dtype",
    "fp16.enabled": "train.dtype",
    "bf16.bf16_optimizer_states": "train.optimizer_dtype",
    "train_batch_size": "train.batch_size",
    "train_micro_batch_size_per_gpu": "train.tokens_per_batch",
    "gradient_accumulation_steps": "train.tokens_per_batch",
    "bf16.check_grad_overflow": "an update is all or nothing",
    "zero_optimization.compute_grad_norm": "an update is all or nothing",
}
# The top-level keys of DeepSpeed 0.19.
_KNOWN = """
    activation_checkpointing aio amp autotuning bf16 checkpoint comet comms_logger
    communication_data_type compile compression_training csv_monitor curriculum_learning
    data_efficiency data_types dataloader_drop_last disable_allgather disable_python_gc dump_state
    eigenvalue elasticity expert_parallel flops_profiler fp16 gradient_accumulation_steps
    gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting
    hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula optimizer
    pipeline prescale_gradients progressive_layer_drop quantize_training scheduler
    seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients
    steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization
"""
KNOWN = frozenset(_KNOWN.split())
ADDED = (
    "optimizer",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
)
BLOCKS = (
    "bf16",
    "fp16",
    "optimizer",
    "optimizer.params",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
)
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def filled(
    theirs: dict[str, Any], ours: dict[str, Any], *, source: str, batch_size: int
) -> dict[str, Any]:
    """The user's file, with align's value for every "auto" and every missing key."""
    _require_sound(theirs, source)
    config = copy.deepcopy(theirs)
    if wrong := [*_contradictions(config, ours, batch_size)]:
        lines = "".join(f"\n  {line}" for line in wrong)
        raise UsageError(
            f"{source} contradicts the options of this run:{lines}\n"
            'Change one of them, or write "auto" in the file.'
        )

    for key in BATCHES:
        config[key] = ours[key]
    missing = [key for key in ADDED if _at(config, key) is None]
    # The user's other keys, such as the kind of optimizer, are kept.
    for key in (*missing, *(key for key, value in leaves(theirs) if value == AUTO)):
        if (value := _at(ours, key)) is not None:
            _put(config, key, copy.deepcopy(value))
    if _at(config, "optimizer.type") in ("Adam", ours["optimizer"]["type"]):
        params = config["optimizer"].setdefault("params", {})
        config["optimizer"]["params"] = copy.deepcopy(ours["optimizer"]["params"]) | params
    if left := [key for key, value in leaves(config) if value == AUTO]:
        raise UsageError(f'{source}: write a value instead of "auto" for {", ".join(left)}.')
    return config


def _require_sound(config: dict[str, Any], source: str) -> None:
    """Refuses values that are wrong with any options."""
    for key in config:
        if key not in KNOWN:  # DeepSpeed would ignore it
            hint = did_you_mean(closest(key, KNOWN))
            raise UsageError(f"{source}: DeepSpeed has no key {key!r}.{hint} Correct or remove it.")
    for key in BLOCKS:
        if not isinstance(_at(config, key), dict | None):
            raise UsageError(f"{source}: {key} must be an object.")
    stage = stage_of(config)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UsageError(f"{source}: zero_optimization.stage is {stage!r:.60}. Use 0, 1, 2 or 3.")


def _contradictions(config: dict[str, Any], ours: dict[str, Any], batch_size: int) -> Iterator[str]:
    for key, reason in REFUSED.items():
        if key in config:
            yield f"{key}: {reason}"
    kind, wanted = _at(config, "optimizer.type"), _at(ours, "optimizer.type")
    # The file may name an optimizer that train.optimizer does not have.
    if wanted != "AdamW" and kind not in (None, AUTO, wanted):
        yield f"optimizer.type: {kind!s:.60} in the file, {wanted} here (train.optimizer)"
    expected = ours | {
        "train_batch_size": batch_size,
        "bf16": {"bf16_optimizer_states": False, "check_grad_overflow": True} | ours["bf16"],
        "zero_optimization": {"compute_grad_norm": True},
    }
    for key, option in OPTION_OF.items():
        found, value = _at(config, key), _at(expected, key)
        if found not in (None, AUTO) and not _same(found, value):
            yield f"{key}: {found!s:.60} in the file, {value} here ({option})"


def stage_of(config: dict[str, Any]) -> Any:
    """The ZeRO stage of the configuration."""
    return config.get("zero_optimization", {}).get("stage", 0)


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state is in the CPU's memory, or on a disk."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(offload.get("device", "none") != "none")


def states_of(kind: str) -> float:
    """The state values per element that an optimizer of this type keeps."""
    return _STATES.get(kind.lower(), 0.0)


def leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values of nested objects, by dotted name."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _at(config: dict[str, Any], dotted: str) -> Any:
    """The value at `a.b.c`; None if there is none."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _put(config: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    config[last] = value


def _same(found: Any, value: Any) -> bool:
    if isinstance(found, list | tuple) and isinstance(value, list):
        return len(found) == len(value) and all(map(_same, found, value))
    is_number = isinstance(found, int | float) and isinstance(value, int | float)
    return bool(abs(found - value) <= 1e-12 * abs(value)) if is_number else found == value
