"""A user's DeepSpeed file: filled where it says "auto", refused where it contradicts us."""

from __future__ import annotations

import copy
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ...schemas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

AUTO = "auto"
# Why a block cannot be honoured, whatever it holds.
REFUSED = {
    "scheduler": "train.schedule, train.warmup and train.min_lr decide the learning rate",
    "elasticity": "DeepSpeed no longer trains elastically; start again with --resume auto",
    "amp": "NVIDIA apex is not supported; use train.dtype",
    "torch_autocast": "train.dtype decides the precision",
    "tensor_parallel": "every rank is given rows of its own",
    "pipeline": "every rank is given rows of its own",
    "sequence_parallel_size": "every rank is given rows of its own",
    "managed_gradient_accumulation": "the number of micro-batches is decided step by step",
}
# What an update that is applied or not, and nothing between, depends on.
REQUIRED = {
    "bf16.check_grad_overflow": True,
    "bfloat16.check_grad_overflow": True,
    "zero_optimization.compute_grad_norm": True,
}
OPTION_OF = {
    "gradient_clipping": "train.max_grad_norm",
    "optimizer.params.lr": "train.lr",
    "optimizer.params.betas": "train.beta1, train.beta2",
    "optimizer.params.eps": "train.epsilon",
    "optimizer.params.weight_decay": "train.weight_decay",
    "bf16.enabled": "train.dtype",
    "fp16.enabled": "train.dtype",
    "train_batch_size": "train.batch_size",
    "train_micro_batch_size_per_gpu": "train.tokens_per_batch",
    "gradient_accumulation_steps": "train.tokens_per_batch",
}
# The top-level keys of DeepSpeed 0.19.
_KNOWN = """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger
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
ADDED = ("optimizer", "gradient_clipping", "bf16.enabled", "fp16.enabled")
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def filled(
    theirs: dict[str, Any], ours: dict[str, Any], *, place: str, batch_size: int
) -> dict[str, Any]:
    """Their file with our values at every "auto" and where a value of ours is missing."""
    config = copy.deepcopy(theirs)
    if "bfloat16" in config and "bf16" not in config:
        config["bf16"] = config.pop("bfloat16")
    _require_known(config, place)
    _require_possible(config, place)
    wrong = [*_refused(config), *_contradictions(config, ours, batch_size)]
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong)
        raise UsageError(
            f"{place} contradicts the options of this run:{lines}\n"
            'Change one of the two, or write "auto" in the file.'
        )
    _fill(config, ours)
    if left := [key for key, value in leaves(config) if value == AUTO]:
        raise UsageError(f'{place}: no option of ours fills the "auto" of {", ".join(left)}.')
    return config


def _require_known(config: dict[str, Any], place: str) -> None:
    """DeepSpeed reads past a top-level key that it does not know."""
    for key in config:
        if key not in KNOWN:
            near = get_close_matches(key, KNOWN, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(
                f"{place}: DeepSpeed knows no {key!r}.{hint} Correct it or take it out."
            )


def _require_possible(config: dict[str, Any], place: str) -> None:
    for key in ("bf16", "fp16", "optimizer", "zero_optimization"):
        if not isinstance(config.get(key, {}), dict):
            raise UsageError(f"{place}: {key} must be an object, found {config[key]!r:.60}.")
    if not isinstance(config.get("optimizer", {}).get("params", {}), dict):
        raise UsageError(f"{place}: optimizer.params must be an object.")
    if all(_at(config, f"{name}.enabled") is True for name in ("bf16", "fp16")):
        raise UsageError(f"{place}: bf16 and fp16 are both enabled; leave one of them.")
    stage = stage_of(config)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UsageError(f"{place}: zero_optimization.stage is {stage!r}; it is 0, 1, 2 or 3.")


def _refused(config: dict[str, Any]) -> Iterator[str]:
    for key, reason in REFUSED.items():
        if key in config:
            yield f"{key}: {reason}"
    for key, value in REQUIRED.items():
        if _at(config, key) not in (None, value, AUTO):
            yield f"{key}: {_at(config, key)} in the file, but it has to be {value}"


def _contradictions(config: dict[str, Any], ours: dict[str, Any], batch_size: int) -> Iterator[str]:
    expected = ours | {"train_batch_size": batch_size}
    for key, option in OPTION_OF.items():
        found, value = _at(config, key), _at(expected, key)
        if found not in (None, AUTO) and not _same(found, value):
            yield f"{key}: {found} in the file, {value} here ({option})"


def _fill(config: dict[str, Any], ours: dict[str, Any]) -> None:
    for key in BATCHES:
        config[key] = ours[key]
    for key in ADDED:
        if _at(config, key) is None:
            _put(config, key, copy.deepcopy(_at(ours, key)))
    # Other keys of theirs, such as the kind of optimizer, stay as they are.
    for key, value in list(leaves(config)):
        if value == AUTO and _at(ours, key) is not None:
            _put(config, key, copy.deepcopy(_at(ours, key)))
    if _at(config, "optimizer.type") in ("Adam", "AdamW"):
        config["optimizer"].setdefault("params", {})
        for name, value in ours["optimizer"]["params"].items():
            if name != "torch_adam":
                config["optimizer"]["params"].setdefault(name, copy.deepcopy(value))


def stage_of(config: dict[str, Any]) -> Any:
    """ZeRO's, as the configuration says it."""
    return config.get("zero_optimization", {}).get("stage", 0)


def leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested objects, by its dotted name."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _at(config: dict[str, Any], dotted: str) -> Any:
    """The value at `a.b.c`; None where there is none."""
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
