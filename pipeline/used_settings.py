"""The settings of a run as they were used: what was left to be found out is filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..stages.model.logprobs import causal_model
from .settings import flatten, without_secrets

if TYPE_CHECKING:
    from .session import Session


def used_settings(session: Session, *sections: str) -> dict[str, str]:
    """By their dotted names, those of these sections."""
    config, policy = session.job.config, session.job.policy
    chosen = {*sections} | ({"lora"} if config.lora.enabled else set())
    found = {
        "model.path": policy.path,
        "model.adapter": policy.adapter,
        "model.device": session.policy.device.type,
        "train.cache": str(session.job.cache.root),
        "train.model": policy.path,
        "train.tokens_per_batch": session.feed.settings.tokens_per_batch,
        "train.dtype": str(causal_model(session.policy.model).dtype).removeprefix("torch."),
    }
    # How a run was begun is no setting that it learns by.
    asked = {name: value for name, value in flatten(config).items() if name != "train.resume"}
    return {
        name: str(value)
        for name, value in without_secrets({**asked, **found}).items()
        if name.partition(".")[0] in chosen
    }
