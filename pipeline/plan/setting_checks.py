"""Checks of a training's settings against each other, before anything is read."""

from __future__ import annotations

import re

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.train_options import LoraOptions, TrainOptions
from ...stages.methods.recipe import Recipe
from ...stages.model.model_folder import require_bitsandbytes
from ...stages.storage.run.checkpoints import wanted
from ...stages.tracking.journal import EVAL
from ..options.settings import Settings


def require_effect(settings: Settings) -> None:
    """Refuses settings that would have no effect, or that need another one."""
    train, lora, best = settings.config.train, settings.config.lora, settings.config.train.best
    of_adapter = [] if lora.enabled else [*settings.given("lora")]
    is_measured_apart = bool(best) and wanted(best).metric.startswith(EVAL)
    wrong = (
        (
            train.cache and settings.origins.get("cache.output") == "--set",
            "cache.output and train.cache are both set. Name the cache once.",
        ),
        (
            train.eval_cache and train.eval_fraction,
            "train.eval_cache and train.eval_fraction are both set. Choose one.",
        ),
        (
            of_adapter,
            f"{', '.join(of_adapter[:1])} is set, but no adapter is trained. Add --lora, or unset "
            "it.",
        ),
        (
            lora.dropout and not train.dropout,
            f"lora.dropout is {lora.dropout}, but train.dropout is off, which turns all dropout "
            "off. Set train.dropout, or leave lora.dropout at 0.",
        ),
        (
            train.eval_text and not train.holds_rows_out,
            "train.eval_text is set, but no rows are held out for it. Set train.eval_fraction or "
            "train.eval_cache, or unset it.",
        ),
        (
            train.eval_text and not train.eval_table,
            "train.eval_text is set, but train.eval_table is 0: no held-out row is written down. "
            "Say how many are to be.",
        ),
        (
            train.min_lr and train.schedule == "constant",
            f"train.min_lr is {train.min_lr}, but a constant schedule never falls. Choose another "
            "train.schedule, or unset it.",
        ),
        (
            train.offloads_inputs and not train.recomputes,
            "train.checkpoint_offload is on, but train.gradient_checkpointing is not: nothing "
            "would be kept that could wait on the CPU. Set the latter, or unset the former.",
        ),
        (
            (train.write_best or train.patience) and not best,
            f"train.{'write_best' if train.write_best else 'patience'} is set, and train.best is "
            "not. Name the metric by which the best is chosen, such as train.best=eval/loss.",
        ),
        (
            train.patience and not is_measured_apart,
            f"train.patience is {train.patience}, and counts evaluations on held-out rows. Set "
            "train.best to the metric that has to get better, such as eval/loss.",
        ),
        (
            is_measured_apart and not train.holds_rows_out,
            f"train.best is {best}, but no rows are held out to measure it on. Set "
            "train.eval_fraction or train.eval_cache, or name a metric of the training steps.",
        ),
        (
            is_measured_apart and not train.eval_every,
            f"train.best is {best}, but train.eval_every is 0: no checkpoint on the way is "
            "measured. Set it, best to train.save_every.",
        ),
        (
            train.write_best
            and is_measured_apart
            and (not train.save_every or train.eval_every % train.save_every),
            "train.write_best needs a checkpoint of every evaluation: train.eval_every is "
            f"{train.eval_every}, and train.save_every {train.save_every}. Set the latter to the "
            "same number.",
        ),
    )
    for is_wrong, sentence in wrong:
        if is_wrong:
            raise UsageError(sentence)
    bytes_of(train.memory, name="train.memory")


def require_margins(recipe: Recipe) -> None:
    """Refuses a method whose rows are neither right nor wrong."""
    if recipe.rows not in ("paired", "labelled") or not recipe.reward_formula:
        raise UsageError(
            f"train.row_margins is on, but rows of {recipe.name} have no margin: it compares no "
            "rewards of good and bad completions. Unset it."
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
            "which flattens and spreads the weights: packed ones cannot be. Use --deepspeed zero2, "
            "or set lora.quantize to none."
        )


def require_compilable(config: Config, zero_stage: int) -> None:
    """Refuses compiled layers inside of which weights are gathered, or which would draw masks."""
    train, is_packed = config.train, config.lora.quantize != "none"
    if not config.model.compile:
        return
    if zero_stage == 3 or is_packed or train.dropout or train.router_loss:
        raise UsageError(
            "model.compile is on, and layers are not compiled under ZeRO-3, in 4 bits, with "
            "train.dropout or with train.router_loss. Set it to false."
        )


FULL_LR = 1e-5  # rates up to this are usual for all weights


def learning_rate_note(train: TrainOptions, lora: LoraOptions) -> str:
    """What is usual for LoRA, where its learning rate is one for training all weights."""
    if not (lora.enabled and 0 < train.lr <= FULL_LR):
        return ""
    return (
        f"note: train.lr is {train.lr:g}, which is usual where all weights learn; LoRA usually "
        "learns at 1e-4 to 2e-4 (--lr 1e-4)."
    )


_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([gm])(?:i?b)?", re.IGNORECASE)
_BYTES = re.compile("[0-9]{1,18}")
_UNITS = {"g": 2**30, "m": 2**20}


def bytes_of(size: str | int, *, name: str, least: int = 2**20) -> int:
    """`80g` or `512m` in bytes, by powers of 1,024; a number alone is bytes; empty: 0."""
    if not (text := str(size)):
        return 0
    match = _SIZE.fullmatch(text)
    exact = int(text) if _BYTES.fullmatch(text) else 0
    found = round(float(match[1]) * _UNITS[match[2].lower()]) if match else exact
    if found < least:
        raise UsageError(
            f"{name} is {size!r}; expected a size such as 24g or 512m, or {least:,} bytes or more."
        )
    return found


_PARTS = re.compile("".join(rf"(?:([0-9]{{1,9}}){unit})?" for unit in "dhms"))
_SECONDS = (86_400, 3600, 60, 1)


def seconds_of(text: str) -> float:
    """`3h30m` in seconds; an empty text is infinity."""
    if not text:
        return float("inf")
    parts = _PARTS.fullmatch(text)
    if parts is None:
        raise UsageError(f"train.max_time is {text!r}; expected a time such as 3h30m, 45m or 90s.")
    return float(
        sum(int(count or 0) * size for count, size in zip(parts.groups(), _SECONDS, strict=True))
    )
