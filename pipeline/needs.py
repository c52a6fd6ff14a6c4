"""What a recipe needs of a cache beside rows: how it reads them, and what has to be there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..schemas.config import TokenOptions
from ..schemas.errors import UsageError
from ..stages.data.tokenizer import load_tokenizer
from ..stages.feed.conversions import Reading, ScoreRules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..schemas.cache import Manifest
    from ..schemas.config import TrainOptions
    from ..schemas.rows import Role
    from ..stages.feed.conversions import Threshold
    from ..stages.feed.train_source import TrainSource
    from ..stages.methods.recipe import Recipe
    from ..stages.storage.cache_folder import CacheFolder

_WORDS: dict[float | str, Threshold] = {"mean": "mean", "median": "median"}
# What other trainers call a reference that follows the policy.
MOVING = {
    "sync_reference",
    "sync_ref_model",
    "ref_model_sync_steps",
    "ref_model_mixup_alpha",
}


def require_fixed_reference(method: Mapping[str, Any]) -> None:
    """Refuses options that would move the reference while its log-probs lie in a cache."""
    for name in method:
        if name.rpartition(".")[2] in MOVING:
            raise UsageError(
                f"method.{name} would move the reference while training, and the cache holds the "
                "log-probs of one that stays. Go round by round: train, make a cache with the "
                "trained model (`align precompute-ref … --model RUN/model --output OTHER`), train "
                "again on it (`align train --cache OTHER`)."
            )


def require_token_logps(recipe: Recipe, folder: CacheFolder, manifest: Manifest) -> None:
    """Refuses a cache of sums to a recipe that reads the reference token by token."""
    if "token_reference" not in recipe.needs:
        return
    if manifest.fingerprint["cache.token_logps"] != "true":
        raise UsageError(
            f"{recipe.name} with these options needs the reference's log-prob of every token, and "
            f"{folder.root} keeps their sums only. Make another cache with `align precompute-ref … "
            "--token-logps --output OTHER`; it scores everything once more."
        )


def reading_of(recipe: Recipe, train: TrainOptions, policy: str) -> Reading:
    """How stored rows are read; `policy` is the folder of the policy, for its tokenizer."""
    return Reading(
        kind=recipe.rows,
        mismatched="mismatched" in recipe.needs,
        eval_fraction=train.eval_fraction,
        rules=ScoreRules(
            train.pairs_from_scores,
            train.min_score_gap,
            _threshold(train.label_threshold),
            recipe.bad_score,
        ),
        needs_scores="scores" in recipe.needs or recipe.rows == "grouped",
        columns=tuple(dict.fromkeys(recipe.modifiers.columns)),
        context=_context(recipe, policy),
    )


def require_positions(source: TrainSource, recipe: Recipe, last: int | None) -> None:
    """Refuses rows that reach past the last position of the policy; None: it knows no last one."""
    if last is None or source.index.longest <= last:
        return
    more = max(map(len, source.reading.context.values()), default=0)
    added = (
        f", {more} of them those that {recipe.name} puts behind a prompt (method.good_token and "
        "method.bad_token)"
        if more
        else ""
    )
    raise UsageError(
        f"The longest row of {source.folder.root} has {source.index.longest:,} tokens{added}, and "
        f"the policy's last position is {last:,}. Make a cache with `align precompute-ref … "
        f"--max-length {last - more} --output OTHER`."
    )


def _threshold(given: float | str) -> Threshold:
    if given in _WORDS:
        return _WORDS[given]
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"train.label_threshold is {given!r}; expected mean, median or a number.")
    return number


def _context(recipe: Recipe, policy: str) -> dict[Role, tuple[int, ...]]:
    """The tokens a method wants between a prompt and the completions of each role."""
    wanting = [part for part in recipe.parts if part.method.context]
    if not wanting:
        return {}
    name = wanting[0].method.name
    if len(recipe.parts) > 1:
        raise UsageError(
            f"{name} shows the policy other prompts than the reference saw: it cannot be mixed."
        )
    (part,) = wanting
    assert part.method.context is not None
    texts = part.method.context(part.options)
    backend = load_tokenizer(policy, TokenOptions(bos="never", eos="never")).backend
    context = {
        role: tuple(backend.encode(text, add_special_tokens=False).ids)
        for role, text in texts.items()
    }
    _require_telling(name, texts.values(), list(context.values()))
    return context


def _require_telling(name: str, texts: Iterable[str], tokens: list[tuple[int, ...]]) -> None:
    if not all(tokens) or len(set(tokens)) < len(tokens):
        given = " and ".join(map(repr, texts))
        raise UsageError(
            f"{name} tells good from bad by {given}, and to this tokenizer they are empty or "
            "alike. Choose others with --set method.good_token=… and --set method.bad_token=…."
        )
