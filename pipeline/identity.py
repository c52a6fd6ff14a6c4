"""What a cache is made from, field by field, and how two such descriptions may differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schemas.cache import FORMAT_VERSION
from ..schemas.errors import FingerprintError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..schemas.config import Config

KL_PAIRS = "cache.kl_pairs"
FILES = "data.files"
# A cache may grow in place along these; along all others it would become another cache.
GROWS_ALONG = {FILES, KL_PAIRS}


def fingerprint(
    config: Config,
    *,
    files: str,
    shape: str,
    tokenizer: Mapping[str, str],
    model: Mapping[str, str],
) -> dict[str, str]:
    """Every named thing that the bytes of the cache depend on."""
    tokens, cache = config.tokens, config.cache
    return {
        "format": str(FORMAT_VERSION),
        FILES: files,
        "data.shape": shape,
        **tokenizer,
        "tokens.max_length": str(tokens.max_length),
        "tokens.max_prompt_length": str(tokens.max_prompt_length),
        "tokens.prompt_side": tokens.prompt_side,
        "tokens.bos": tokens.bos,
        "tokens.eos": tokens.eos,
        "tokens.boundary": tokens.boundary,
        "tokens.date": tokens.date,
        KL_PAIRS: str(cache.kl_pairs),
        "cache.seed": str(cache.seed),
        "cache.token_logps": str(cache.token_logps).lower(),
        "cache.rows_per_shard": str(cache.rows_per_shard),
        "cache.tokens_per_shard": str(cache.tokens_per_shard),
        "scoring.tokens_per_batch": str(config.scoring.tokens_per_batch),
        **model,
    }


def differences(stored: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Field by field, what was stored and what is wanted now."""
    return {
        name: f"{name}: the cache has {_short(stored, name)}, now {_short(wanted, name)}"
        for name in sorted({*stored, *wanted})
        if stored.get(name) != wanted.get(name)
    }


def require_same_or_growing(
    stored: Mapping[str, str], wanted: Mapping[str, str], *, where: str
) -> None:
    """Refuses to turn a cache into a different one."""
    found = differences(stored, wanted)
    shrinks = KL_PAIRS in found and int(wanted[KL_PAIRS]) < int(stored[KL_PAIRS])
    if set(found) <= GROWS_ALONG and not shrinks:
        return
    lines = "\n  ".join(found.values())
    raise FingerprintError(
        f"{where} belongs to another cache. What differs:\n  {lines}\n"
        f"Choose another --output ({_cost(found)}), or undo the change."
    )


def _cost(found: Mapping[str, str]) -> str:
    if {name.partition(".")[0] for name in found} & {"model", "numerics"}:
        return "the reference differs, so everything is scored anew there"
    return "scores both caches need are copied, not computed again"


def _short(fields: Mapping[str, str], name: str) -> str:
    value = fields.get(name, "nothing")
    return f"{value[:12]}…" if len(value) == 64 else value
