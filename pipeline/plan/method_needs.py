"""What a method needs of a cache: the rows that it reads, token log-probs, samples as drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...schemas.cache import Manifest
from ...schemas.data_options import TokenOptions
from ...schemas.errors import UsageError, counted
from ...schemas.rows import Role
from ...schemas.samples import Drawing
from ...schemas.train_options import TrainOptions
from ...stages.data.tokenizer import load_tokenizer
from ...stages.feed.select import ReadSpec, ScoreRules, Threshold
from ...stages.storage.cache import Cache

if TYPE_CHECKING:
    from ...stages.methods.recipe import Recipe

_WORDS: dict[float | str, Threshold] = {"mean": "mean", "median": "median"}


def read_spec_of(recipe: Recipe, train: TrainOptions, policy: str) -> ReadSpec:
    """The read spec of stored rows; `policy` is the policy's folder, for its tokenizer."""
    shares = (train.desirable_share, train.undesirable_share)
    if recipe.rows != "labelled" and shares != (1.0, 1.0):
        raise UsageError(
            f"train.desirable_share and train.undesirable_share are for methods that read labels, "
            f"such as kto; {recipe.name} reads {recipe.rows} rows. Unset both."
        )
    return ReadSpec(
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
        file_weights=train.file_weights,
        label_shares=shares,
        seed=train.seed,
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
    """The tokens a method puts between a prompt and the completions of each role."""
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
            f"{name} marks good and bad by {given}, which are empty or alike to this "
            "tokenizer. Choose others with --set method.good_token=… and --set method.bad_token=…."
        )


def require_logps(recipe: Recipe, folder: Cache, manifest: Manifest) -> None:
    """Refuses a cache without log-probs, or without those of tokens, where a recipe needs them."""
    if "reference" in recipe.needs and not manifest.is_scored:
        raise UsageError(
            f"{recipe.name} needs the reference's log-probs, and {folder.root} is not scored "
            "(cache.scored is false). Make another cache without --no-scored: --output OTHER."
        )
    if "token_reference" not in recipe.needs:
        return
    if manifest.fingerprint["cache.token_logps"] != "true":
        raise UsageError(
            f"{recipe.name} with these options needs the reference's log-prob of every token, and "
            f"{folder.root} keeps their sums only. Make another cache with `align precompute-ref … "
            "--token-logps --output OTHER`; it scores everything again."
        )


def require_own_samples(
    recipe: Recipe, where: object, drawn: Iterable[Drawing | None], *, may_differ: bool
) -> None:
    """Refuses samples that the reference did not draw as it is, for a ratio to its log-probs."""
    others = [one for one in dict.fromkeys(drawn) if one and not one.is_own]
    if others and recipe.drawn_by_reference and not may_differ:
        raise UsageError(
            f"{recipe.name} divides by the reference's probabilities as by those that the samples "
            f"were drawn from, and those of {where} are drawn at {'; at '.join(map(str, others))}. "
            "Sample at temperature 1 without top-p and top-k, or, if this is meant, pass "
            "--set train.other_sampling=true."
        )


def sampling_note(recipe: Recipe, manifest: Manifest) -> str:
    """The sampling of a cache's samples, where the loss depends on it."""
    if not recipe.drawn_by_reference:
        return ""
    drawn = manifest.sampling or (None,) * len(manifest.inputs)
    known = dict.fromkeys(f"at {one}" for one in drawn if one)
    unknown = sum(one is None for one in drawn)
    lines = [f"drawn {' and '.join(known)}"] if known else []
    lines += [f"not known of {counted(unknown, 'data files')}"] if unknown else []
    return f"samples: {', '.join(lines)}; {recipe.name} divides by the reference at temperature 1"
