"""Checks of a training's settings against each other, before anything is read."""

from __future__ import annotations

import re

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.train_options import LoraOptions, TrainOptions
from ...stages.methods.objective import Objective
from ...stages.model.model_folder import require_bitsandbytes
from ...stages.storage.run.checkpoints import wanted
from ...stages.tracking.metrics_log import EVAL
from ..options.settings import Settings


def require_effect(settings: Settings) -> None:
    """Refuses settings that would have no effect, or that need another one."""
    train, lora = settings.config.train, settings.config.lora
    if train.cache and settings.origins.get("cache.output") == "--set":
        raise UsageError("cache.output and train.cache are both set. Name the cache once.")
    if not lora.enabled and (given := [*settings.given("lora")]):
        raise UsageError(f"{given[0]} is set, but no adapter is trained. Add --lora, or unset it.")
    if lora.dropout and not train.dropout:
        raise UsageError(
            f"lora.dropout is {lora.dropout}, but train.dropout is off, which turns all dropout "
            "off. Set train.dropout, or leave lora.dropout at 0."
        )
    if train.min_lr and train.schedule == "constant":
        raise UsageError(
            f"train.min_lr is {train.min_lr}, but a constant train.schedule never falls. Unset one."
        )
    if train.offloads_inputs and not train.recomputes:
        raise UsageError("train.checkpoint_offload is on: set train.gradient_checkpointing too.")
    _require_measured(train)
    bytes_of(train.memory, name="train.memory")


def _require_measured(train: TrainOptions) -> None:
    """Refuses settings of evaluation where nothing would be measured for them."""
    if train.eval_cache and train.eval_fraction:
        raise UsageError("train.eval_cache and train.eval_fraction are both set. Choose one.")
    if train.eval_text and not (train.holds_rows_out and train.eval_table):
        raise UsageError(
            "train.eval_text is set, and needs held-out rows: set train.eval_fraction or "
            "train.eval_cache, and train.eval_table above 0."
        )
    best = train.best
    if not best and (train.write_best or train.patience):
        raise UsageError(
            f"train.{'write_best' if train.write_best else 'patience'} is set, and train.best is "
            "not. Name the metric by which the best is chosen, such as train.best=eval/loss."
        )
    if not best or not wanted(best).metric.startswith(EVAL):
        if train.patience:
            raise UsageError(
                f"train.patience counts evaluations, and train.best is {best}. Set it to one of "
                "their metrics, such as eval/loss."
            )
        return
    if not train.holds_rows_out:
        raise UsageError(
            f"train.best is {best}, and needs held-out rows: set train.eval_fraction or "
            "train.eval_cache, or name a metric of the training steps."
        )
    if not train.eval_every:
        raise UsageError(
            f"train.best is {best}, but train.eval_every is 0: no checkpoint on the way is "
            "measured. Set it, best to train.save_every."
        )
    if train.write_best and (not train.save_every or train.eval_every % train.save_every):
        raise UsageError(
            "train.write_best needs a checkpoint of every evaluation: train.eval_every is "
            f"{train.eval_every}, and train.save_every {train.save_every}. Set the latter to the "
            "same number."
        )


def require_margins(objective: Objective) -> None:
    """Refuses a method whose rows are neither right nor wrong."""
    if objective.rows not in ("paired", "labelled") or not objective.reward_formula:
        raise UsageError(
            f"train.row_margins is on, but {objective.name} compares no rewards of good and bad "
            "completions. Unset it."
        )


def require_packable(train: TrainOptions, lora: LoraOptions, zero_stage: int) -> None:
    """Refuses what needs bitsandbytes where it is missing, and 4 bits that ZeRO would flatten."""
    if train.optimizer == "adamw8bit":
        require_bitsandbytes("train.optimizer=adamw8bit")
    if lora.quantize == "none":
        return
    require_bitsandbytes(f"lora.quantize={lora.quantize}")
    if zero_stage == 3:
        raise UsageError(
            f"lora.quantize is {lora.quantize}, and train.deepspeed={train.deepspeed} is ZeRO 3, "
            "which flattens the weights: packed ones cannot be. Use --deepspeed zero2, or set "
            "lora.quantize to none."
        )


def require_compilable(config: Config, zero_stage: int) -> None:
    """Refuses compiled layers inside of which weights are gathered, or which would draw masks."""
    train, is_packed = config.train, config.lora.quantize != "none"
    if config.model.compile and (
        zero_stage == 3 or is_packed or train.dropout or train.router_loss
    ):
        raise UsageError(
            "model.compile is on, and layers are not compiled under ZeRO-3, in 4 bits, with "
            "train.dropout or with train.router_loss. Set it to false."
        )


def learning_rate_note(train: TrainOptions, lora: LoraOptions) -> str:
    """What is usual for LoRA, where its learning rate is one for training all weights."""
    if not (lora.enabled and 0 < train.lr <= 1e-5):
        return ""
    return (
        f"note: train.lr is {train.lr:g}, which is usual where all weights learn; LoRA usually "
        "learns at 1e-4 to 2e-4 (--lr 1e-4)."
    )


_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:([gm])(?:i?b)?)?", re.IGNORECASE)
_UNITS = {"": 1, "m": 2**20, "g": 2**30}


def bytes_of(size: str | int, *, name: str, least: int = 2**20) -> int:
    """`80g` or `512m` in bytes, by powers of 1,024; a number alone is bytes; empty: 0."""
    if not (text := str(size)):
        return 0
    match = _SIZE.fullmatch(text)
    found = round(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if found < least:
        raise UsageError(
            f"{name} is {size!r}; expected a size such as 24g or 512m, or {least:,} bytes or more."
        )
    return found


_TIME = re.compile("".join(rf"(?:([0-9]{{1,9}}){unit})?" for unit in "dhms"))


def seconds_of(text: str) -> float:
    """`3h30m` in seconds; an empty text is infinity."""
    if not text:
        return float("inf")
    if (parts := _TIME.fullmatch(text)) is None:
        raise UsageError(f"train.max_time is {text!r}; expected a time such as 3h30m, 45m or 90s.")
    days, hours, minutes, seconds = (int(count or 0) for count in parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
