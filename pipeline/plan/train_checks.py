"""Every check of a training run's settings: against its cache, its policy, and each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.cache import Manifest
from ...schemas.config import ModelOptions, TokenOptions
from ...schemas.errors import FingerprintError, UsageError, closest, counted, did_you_mean
from ...schemas.rows import Role
from ...schemas.samples import Drawing
from ...schemas.train_options import LoraOptions, TrainOptions
from ...stages.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from ...stages.engine.optimizers import KINDS
from ...stages.feed.conversions import ReadSpec, ScoreRules, Threshold
from ...stages.feed.train_source import TrainSource
from ...stages.model.loading.quantized_base import require_bitsandbytes
from ...stages.storage.cache.cache_folder import CacheFolder
from ...stages.storage.run.checkpoints import wanted
from ...stages.tracking.journal import EVAL
from ..jobs.differences import differences
from ..options.settings import Settings, flatten

if TYPE_CHECKING:
    from ...stages.methods.recipe import Recipe

# Parts of a fingerprint that two caches share when their numbers can be compared.
MAKING = {"model", "numerics", "tokenizer", "tokens"}


def require_same_text(
    manifest: Manifest, policy: str, tokens: TokenOptions, given: Mapping[str, str]
) -> None:
    """Refuses a cache whose token ids mean other text to the policy.

    `given` holds the settings that the user wrote down; all others are taken as the cache's.
    """
    stored = manifest.fingerprint
    options = TokenOptions(
        bos=stored["tokens.bos"],  # type: ignore[arg-type]
        eos=stored["tokens.eos"],  # type: ignore[arg-type]
        date=stored["tokens.date"],
        chat_template=tokens.chat_template,
    )
    wanted = {**stored, **tokenizer_fingerprint(load_tokenizer(policy, options))}
    wanted |= {name: value for name, value in given.items() if name in stored}
    if found := differences(stored, wanted):
        raise FingerprintError(
            f"The cache does not fit {policy} and these settings:{_lines(found)}\n"
            "Make another cache with them, or undo the change."
        )


def named_elsewhere(settings: Settings, manifest: Manifest) -> ModelOptions | None:
    """The reference that align.yaml or ALIGN_MODEL names, unless it is at the cache's own path."""
    model = settings.config.model
    named = replace(
        model, path=model.path or manifest.model, adapter=model.adapter or manifest.adapter
    )
    is_same = _same_path(named.path, manifest.model)
    return None if is_same and _same_path(named.adapter, manifest.adapter) else named


def require_same_model(
    settings: Settings, manifest: Manifest, named: ModelOptions, identity: Mapping[str, str]
) -> None:
    """Refuses an align.yaml or ALIGN_MODEL that names another reference than the cache's."""
    if found := _other_than_reference(manifest, identity):
        name = "model.adapter" if _same_path(named.path, manifest.model) else "model.path"
        origin, value = settings.origins[name], flatten(settings.config)[name]
        raise FingerprintError(
            f"{origin}: {name} is {value}, and the reference of the cache is {manifest.model}"
            f"{f' with {manifest.adapter}' if manifest.adapter else ''}:{_lines(found)}\n"
            "Make a cache with that model, or set it to the cache's. To train from another model "
            "than the reference, pass --model DIR --set train.other_reference=true."
        )


def _same_path(one: str, other: str) -> bool:
    return one == other or bool(one and other and Path(one).resolve() == Path(other).resolve())


def require_same_reference(
    manifest: Manifest, policy: str, identity: Mapping[str, str], *, may_differ: bool
) -> bool:
    """Whether the policy begins as the reference; one that does not is refused unless allowed."""
    found = _other_than_reference(manifest, identity)
    if found and not may_differ:
        raise FingerprintError(
            f"The cache was made with another reference than {policy}:{_lines(found)}\n"
            "Make a cache with this one. If the policy is meant to begin elsewhere than the "
            "reference, pass --set train.other_reference=true."
        )
    return not found


def _other_than_reference(manifest: Manifest, identity: Mapping[str, str]) -> dict[str, str]:
    """The fields in which a model differs from the reference of the cache."""
    named = {name: value for name, value in identity.items() if name != "model.code"}
    return differences({name: manifest.fingerprint[name] for name in named}, named)


def require_same_making(manifest: Manifest, other: Manifest, name: str) -> None:
    """Refuses to evaluate on a cache of another reference, or of other tokens."""
    ours, theirs = (
        {key: value for key, value in one.fingerprint.items() if key.partition(".")[0] in MAKING}
        for one in (manifest, other)
    )
    if found := differences(ours, theirs):
        raise FingerprintError(
            f"{name} (train.eval_cache) was made differently from the cache to train on; first the "
            f"latter, then the former:{_lines(found)}\nMake both with the same model and settings."
        )


def _lines(found: Mapping[str, str]) -> str:
    return "".join(f"\n  {line}" for line in found.values())


_WORDS: dict[float | str, Threshold] = {"mean": "mean", "median": "median"}


def require_token_logps(recipe: Recipe, folder: CacheFolder, manifest: Manifest) -> None:
    """Refuses a cache without token log-probs for a recipe that needs them."""
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


def read_spec_of(recipe: Recipe, train: TrainOptions, policy: str) -> ReadSpec:
    """The read spec of stored rows; `policy` is the policy's folder, for its tokenizer."""
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
        learn=train.learn,
        context=_context(recipe, policy),
    )


def require_positions(source: TrainSource, recipe: Recipe, last: int | None) -> None:
    """Refuses rows longer than the policy's last position; None: it has no limit."""
    if last is None or source.index.longest <= last:
        return
    more = max(map(len, source.spec.context.values()), default=0)
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


def require_measured(train: TrainOptions) -> None:
    """Refuses a `best` metric of held-out rows if the run does not measure them."""
    if not wanted(train.best).metric.startswith(EVAL):
        return
    if not train.holds_rows_out:
        raise UsageError(
            f"train.best is {train.best}, but no rows are held out to measure it on. Set "
            "train.eval_fraction or train.eval_cache, or name a metric of the training steps."
        )
    if not train.eval_every:
        raise UsageError(
            f"train.best is {train.best}, but train.eval_every is 0: no checkpoint on the way is "
            "measured. Set it, best to train.save_every."
        )


class BestMetric:
    """Checks once, at the first measurement, that the `best` metric exists."""

    def __init__(self, best: str) -> None:
        self._metric = wanted(best).metric
        self._is_open = bool(best)

    def warning(self, names: Iterable[str]) -> str:
        """The warning when it is not among these names; empty when it is."""
        known = sorted(names)
        kind = [name for name in known if name.startswith(EVAL) == self._metric.startswith(EVAL)]
        if not self._is_open or not kind:
            return ""
        self._is_open = False
        if self._metric in known:
            return ""
        hint = did_you_mean(closest(self._metric, kind)) or f" Known: {', '.join(kind)}."
        return (
            f"train.best: nothing called {self._metric} was measured.{hint} Where it is missing, "
            "no checkpoint is kept as the best."
        )


def require_effect(settings: Settings) -> None:
    """Refuses settings that would have no effect."""
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
    if train.checkpoint_offload and not train.gradient_checkpointing:
        raise UsageError(
            "train.checkpoint_offload is on, but train.gradient_checkpointing is off: nothing is "
            "kept that could wait on the CPU. Set the latter, or unset the former."
        )
    _require_read_by_optimizer(settings)


FULL_LR = 1e-5  # rates up to this are usual for all weights


def learning_rate_note(train: TrainOptions, lora: LoraOptions) -> str:
    """What is usual for LoRA, where its learning rate is one for training all weights."""
    is_adam = train.optimizer.startswith("adamw")
    if not (lora.enabled and is_adam and 0 < train.lr <= FULL_LR):
        return ""
    return (
        f"note: train.lr is {train.lr:g}, which is usual where all weights learn; LoRA usually "
        "learns at 1e-4 to 2e-4 (--lr 1e-4)."
    )


def _require_read_by_optimizer(settings: Settings) -> None:
    name, given = settings.config.train.optimizer, settings.given("train")
    for option in ("beta1", "beta2", "epsilon"):
        if f"train.{option}" in given and option not in KINDS[name].reads:
            raise UsageError(
                f"train.{option} is set, and {name} (train.optimizer) has no use for it. Unset it, "
                "or choose another optimizer."
            )


def require_packable(train: TrainOptions, lora: LoraOptions, zero_stage: int) -> None:
    """Refuses what needs bitsandbytes where it is missing, and 4 bits that ZeRO would flatten."""
    if KINDS[train.optimizer].needs_bitsandbytes:
        require_bitsandbytes(f"train.optimizer={train.optimizer}")
    if lora.quantize == "none":
        return
    require_bitsandbytes(f"lora.quantize={lora.quantize}")
    if zero_stage == 3:
        raise UsageError(
            f"lora.quantize is {lora.quantize}, and train.deepspeed={train.deepspeed} is ZeRO 3, "
            "which flattens and spreads the weights: packed ones cannot be. Use --deepspeed zero2, "
            "or set lora.quantize to none."
        )


_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_SECONDS = (86_400, 3600, 60, 1)


def seconds_of(text: str, *, name: str) -> float:
    """`3h30m` in seconds; an empty text is infinity."""
    if not text:
        return float("inf")
    parts = _PARTS.fullmatch(text)
    if parts is None:
        raise UsageError(f"{name} is {text!r}; expected a time such as 3h30m, 45m or 90s.")
    return float(
        sum(int(count or 0) * size for count, size in zip(parts.groups(), _SECONDS, strict=True))
    )
