"""Refuses settings of a training run that could have no effect beside its others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schemas.errors import UsageError

if TYPE_CHECKING:
    from .settings import Settings


def require_effect(settings: Settings) -> None:
    """Nothing a person has written down is passed over in silence."""
    train, lora = settings.config.train, settings.config.lora
    if train.cache and settings.origins.get("cache.output") == "--set":
        raise UsageError("cache.output and train.cache are both set. Name the cache once.")
    if train.eval_cache and train.eval_fraction:
        raise UsageError("train.eval_cache and train.eval_fraction are both set. Choose one.")
    if not lora.enabled and (given := [*settings.given("lora")]):
        raise UsageError(f"{given[0]} is set, but no adapter is trained. Add --lora, or unset it.")
    if lora.dropout and not train.dropout:
        raise UsageError(
            f"lora.dropout is {lora.dropout}, but train.dropout is off, which turns all dropout "
            "off. Set train.dropout, or leave lora.dropout at 0."
        )
    if train.eval_text and not train.holds_rows_out:
        raise UsageError(
            "train.eval_text is on, but no rows are held out whose text could be written down. Set "
            "train.eval_fraction or train.eval_cache, or unset it."
        )
    if train.eval_text and not train.eval_table:
        raise UsageError(
            "train.eval_text is on, but train.eval_table is 0: there is no table for it. Say of "
            "how many rows you want to see the text."
        )
    if train.min_lr and train.schedule == "constant":
        raise UsageError(
            f"train.min_lr is {train.min_lr}, but a constant schedule never falls. Choose another "
            "train.schedule, or unset it."
        )
