"""Checks a training's settings against each other, before anything is read."""

from __future__ import annotations

import re
from dataclasses import replace

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.train_options import LoraOptions, TrainOptions
from ...stages.methods.objective import Objective
from ...stages.model.model_folder import adapter_settings, require_bitsandbytes
from ...stages.storage.run.checkpoints import best_metric
from ...stages.tracking.metrics_log import EVAL
from ..options.settings import Settings


def require_effect(settings: Settings) -> None:
    """Refuses settings without effect, or without another setting that they need."""
    train, lora = settings.config.train, settings.config.lora
    is_another = train.cache not in {"", settings.config.cache.output}
    if is_another and settings.origins.get("cache.output") == "--set":
        raise UsageError("cache.output and train.cache are both set. Name the cache once.")
    if lora.dropout and not train.dropout:
        raise UsageError(
            f"lora.dropout is {lora.dropout}, but train.dropout is false, which disables all "
            "dropout. Set train.dropout, or leave lora.dropout at 0."
        )
    if train.min_lr and train.schedule == "constant":
        raise UsageError(
            f"train.min_lr is {train.min_lr}, but a constant train.schedule never falls. Unset one."
        )
    if train.offloads_inputs and not train.recomputes:
        raise UsageError("train.checkpoint_offload is on: set train.gradient_checkpointing too.")
    _require_measured(train)
    bytes_of(train.memory, name="train.memory")


def with_adapters_settings(settings: Settings, objective: Objective, adapter: str) -> Config:
    """The settings, with those of the reference's adapter (a folder) if it is trained further.

    Refuses settings of adapters that have no effect, or contradict the adapter. `adapter` is empty
    if the policy starts from a plain model.
    """
    config, given = settings.config, settings.given("lora")
    lora = config.lora
    if not adapter:
        if "lora.start" in given:
            raise UsageError("lora.start is set, but the policy has no adapter. Unset it.")
    elif lora.start == "merge" or objective.head == "score" or given.get("lora.enabled") is False:
        # An adapter of a language model is none of a reward model.
        if lora.enabled or given.get("lora.start") == "adapter":
            raise UsageError(
                f"{objective.name} with lora.start={lora.start} trains all weights, with {adapter} "
                "merged into them. Pass --lora-start merge without --lora, or for a new adapter "
                "--lora --model MERGED --set train.other_reference=true."
            )
        lora = replace(lora, start="merge")
    else:
        own = adapter_settings(adapter)
        own["dropout"] *= config.train.dropout  # which is off without train.dropout
        for name, value in own.items():
            asked = given.get(f"lora.{name}", value)
            if name == "targets" and {*asked} == {*value}:
                continue
            if asked != value:
                raise UsageError(
                    f"lora.{name} is {asked}, but the adapter of the reference, {adapter}, has "
                    f"{value}, and is trained further. Unset it."
                )
        lora = replace(lora, enabled=True, **own)
    unused = [name for name in given if name not in ("lora.enabled", "lora.start")]
    if unused and not lora.enabled:
        raise UsageError(f"{unused[0]} is set, but no adapter is trained. Add --lora, or unset it.")
    return replace(config, lora=lora)


def _require_measured(train: TrainOptions) -> None:
    """Refuses settings of evaluation that nothing would be measured for."""
    if train.eval_cache and train.eval_fraction:
        raise UsageError("train.eval_cache and train.eval_fraction are both set. Choose one.")
    names = [name for name, _ in train.eval_caches]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"train.eval_cache has two sets {twice[0]}: pass --eval-cache NAME=PATH.")
    if train.eval_text and not (train.holds_rows_out and train.eval_table):
        raise UsageError(
            "train.eval_text is set, but there are no held-out rows to list: set "
            "train.eval_fraction or train.eval_cache, and train.eval_table above 0."
        )
    best = train.best
    if not best and (train.write_best or train.patience):
        raise UsageError(
            f"train.{'write_best' if train.write_best else 'patience'} is set, but train.best is "
            "not. Name the metric that chooses the best, such as train.best=eval/loss."
        )
    if not best or not best_metric(best).metric.startswith(EVAL):
        if train.patience:
            raise UsageError(
                f"train.patience counts evaluations, but train.best is {best}. Set train.best to a "
                "metric of evaluations, such as eval/loss."
            )
        return
    if not train.holds_rows_out:
        raise UsageError(
            f"train.best is {best}, but there are no held-out rows: set train.eval_fraction or "
            "train.eval_cache, or name a metric of the training steps."
        )
    if not train.eval_every:
        raise UsageError(
            f"train.best is {best}, but train.eval_every is 0, so no checkpoint during training is "
            "evaluated. Set train.eval_every, best to train.save_every."
        )
    if train.write_best and (not train.save_every or train.eval_every % train.save_every):
        raise UsageError(
            "train.write_best needs a checkpoint at every evaluation, but train.eval_every is "
            f"{train.eval_every} and train.save_every {train.save_every}. Set both to one number."
        )


def require_margins(objective: Objective) -> None:
    """Refuses a method without reward margins."""
    if objective.rows not in ("paired", "labelled") or not objective.reward_formula:
        raise UsageError(
            f"train.row_margins is on, but {objective.name} does not compare rewards of good and "
            "bad completions. Unset it."
        )


def require_quantizable(train: TrainOptions, lora: LoraOptions, zero_stage: int) -> None:
    """Refuses 8-bit AdamW and 4-bit weights without bitsandbytes, and the latter under ZeRO-3."""
    if train.optimizer == "adamw8bit":
        require_bitsandbytes("train.optimizer=adamw8bit")
    if lora.quantize == "none":
        return
    require_bitsandbytes(f"lora.quantize={lora.quantize}")
    if zero_stage == 3:
        raise UsageError(
            f"lora.quantize is {lora.quantize}, but train.deepspeed={train.deepspeed} is ZeRO 3, "
            "which cannot shard quantized weights. Use --deepspeed zero2, or set lora.quantize to "
            "none."
        )


def learning_rate_note(train: TrainOptions, lora: LoraOptions) -> str:
    """A note if the learning rate of LoRA is one for full training; else empty."""
    if not (lora.enabled and 0 < train.lr <= 1e-5):
        return ""
    return (
        f"note: train.lr is {train.lr:g}, which is usual for full training; LoRA usually needs "
        "1e-4 to 2e-4 (--lr 1e-4)."
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
            f"{name} is {size!r}. Write a size such as 24g or 512m, or {least:,} bytes or more."
        )
    return found


_TIME = re.compile("".join(rf"(?:([0-9]{{1,9}}){unit})?" for unit in "dhms"))


def seconds_of(text: str) -> float:
    """`3h30m` in seconds; an empty text is infinity."""
    if not text:
        return float("inf")
    if (parts := _TIME.fullmatch(text)) is None:
        raise UsageError(f"train.max_time is {text!r}. Write a time such as 3h30m, 45m or 90s.")
    days, hours, minutes, seconds = (int(count or 0) for count in parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
