"""Checks of a cache for a training: its rows, log-probs, samples, text and reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.cache import Manifest, reference_named
from ...schemas.config import ModelOptions
from ...schemas.data_options import TokenOptions
from ...schemas.errors import FingerprintError, UsageError, counted, differences
from ...schemas.rows import Role
from ...schemas.samples import Distribution
from ...schemas.train_options import TrainOptions
from ...stages.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from ...stages.feed.select import ReadSpec, ScoreRules
from ...stages.feed.train_source import TrainSource
from ...stages.model.model_folder import config_digest
from ...stages.storage.cache import Cache
from ..jobs.object_inputs import cache_at
from ..options.settings import Settings, flatten

if TYPE_CHECKING:
    from ...stages.methods.objective import Objective


def read_spec_of(objective: Objective, train: TrainOptions, policy: str) -> ReadSpec:
    """The rules for reading stored rows; `policy` is the policy's folder, for its tokenizer."""
    shares = (train.desirable_share, train.undesirable_share)
    if objective.rows != "labelled" and shares != (1.0, 1.0):
        raise UsageError(
            f"train.desirable_share and train.undesirable_share are for methods that read labels, "
            f"such as kto; {objective.name} reads {objective.rows} rows. Unset both."
        )
    return ReadSpec(
        kind=objective.rows,
        mismatched="mismatched" in objective.needs,
        eval_fraction=train.eval_fraction,
        rules=ScoreRules(
            train.pairs_from_scores,
            train.min_score_gap,
            train.label_threshold,
            objective.bad_score,
        ),
        needs_scores="scores" in objective.needs or objective.rows == "grouped",
        columns=tuple(dict.fromkeys(objective.modifiers.columns)),
        context=_context(objective, policy),
        file_weights=train.file_weights,
        label_shares=shares,
        seed=train.seed,
    )


def _context(objective: Objective, policy: str) -> dict[Role, tuple[int, ...]]:
    """The tokens a method puts between a prompt and the completions of each role."""
    term = next((one for one in objective.terms if one.method.context), None)
    if term is None or term.method.context is None:
        return {}
    if len(objective.terms) > 1:
        raise UsageError(
            f"{term.method.name} changes the prompts, so it cannot be mixed. Train it without a "
            "mixture."
        )
    texts = term.method.context(term.options)
    backend = load_tokenizer(policy, TokenOptions(bos="never", eos="never")).backend
    context = {
        role: tuple(backend.encode(text, add_special_tokens=False).ids)
        for role, text in texts.items()
    }
    if not all(context.values()) or len({*context.values()}) < len(context):
        raise UsageError(
            f"{term.method.name} marks good and bad by {' and '.join(map(repr, texts.values()))}, "
            "which are empty or equal for this tokenizer. Choose another method.good_token or "
            "method.bad_token."
        )
    return context


def require_logps(objective: Objective, folder: Cache, manifest: Manifest) -> None:
    """Refuses a cache without the log-probs, of completions or tokens, that an objective needs."""
    if "reference" in objective.needs and not manifest.is_scored:
        raise UsageError(
            f"{objective.name} needs the reference's log-probs, and {folder.root} is not scored "
            "(cache.scored is false). Make another cache without --no-scored: --output OTHER."
        )
    if "token_reference" in objective.needs and manifest.fingerprint["cache.token_logps"] != "true":
        raise UsageError(
            f"{objective.name} with these options needs the reference's token log-probs, and "
            f"{folder.root} has only their sums. Make another cache with `align precompute-ref … "
            "--token-logps --output OTHER`, which scores everything again."
        )


def require_own_samples(
    objective: Objective, where: object, drawn: Iterable[Distribution | None], *, may_differ: bool
) -> None:
    """Refuses samples not drawn from the reference's own distribution, if the loss needs them."""
    others = [one for one in dict.fromkeys(drawn) if one and not one.is_unmodified]
    if others and objective.drawn_by_reference and not may_differ:
        raise UsageError(
            f"{objective.name} divides by the reference's own probabilities, but the samples "
            f"of {where} are drawn at {'; at '.join(map(str, others))}. Sample at temperature 1 "
            "without top-p and top-k, or pass --set train.other_sampling=true."
        )


def sampling_note(objective: Objective, manifest: Manifest) -> str:
    """A note on how the cache's completions were sampled; empty unless the loss depends on it."""
    if not objective.drawn_by_reference:
        return ""
    drawn = manifest.sampling or (None,) * len(manifest.inputs)
    known = dict.fromkeys(f"at {one}" for one in drawn if one)
    unknown = sum(one is None for one in drawn)
    lines = [f"drawn {' and '.join(known)}"] if known else []
    lines += [f"unknown for {counted(unknown, 'data files')}"] if unknown else []
    return (
        f"samples: {', '.join(lines)}; {objective.name} divides by the reference at temperature 1"
    )


def require_same_text(
    manifest: Manifest, policy: str, tokens: TokenOptions, given: Mapping[str, str]
) -> None:
    """Refuses a cache whose token ids are other text for the policy.

    `given` has the settings that the user set; all others are the cache's.
    """
    if found := _other_text(manifest, policy, tokens, given):
        cached = reference_named(manifest.model, manifest.adapter)
        raise FingerprintError(
            f"The cache, made with {cached}, does not fit {policy} and these settings:"
            f"{_lines(found)}\n"
            "Make another cache with them, or undo the change."
        )


def misfit_note(
    settings: Settings, manifest: Manifest, policy: str, *, needs_reference: bool
) -> str:
    """One line if training would refuse the cache for this policy; its weights are not read."""
    train, tokens = settings.config.train, settings.config.tokens
    found: dict[str, str] = {}
    with suppress(UsageError):  # a plan needs no tokenizer
        found = _other_text(manifest, policy, tokens, {})
    if needs_reference and not train.other_reference:
        identity = {"model.config": config_digest(policy), "model.adapter": "none"}
        found |= _other_than_reference(manifest, identity)
    if not found:
        return ""
    return (
        f"note: `align train` refuses this cache, made with {manifest.model}, for {policy}, which "
        f"differs in {', '.join(found)}."
    )


def _other_text(
    manifest: Manifest, policy: str, tokens: TokenOptions, given: Mapping[str, str]
) -> dict[str, str]:
    """The fields for which the policy or the given settings differ from the cache's text."""
    stored = manifest.fingerprint
    options = TokenOptions(
        bos=stored["tokens.bos"],  # type: ignore[arg-type]
        eos=stored["tokens.eos"],  # type: ignore[arg-type]
        date=stored["tokens.date"],
        chat_template=tokens.chat_template,
    )
    wanted = {**stored, **tokenizer_fingerprint(load_tokenizer(policy, options))}
    wanted |= {name: value for name, value in given.items() if name in stored}
    return differences(stored, wanted)


def named_elsewhere(settings: Settings, manifest: Manifest) -> ModelOptions | None:
    """The reference that align.yaml or ALIGN_MODEL names, unless it is at the cache's own path."""
    model = settings.config.model
    path, adapter = model.path or manifest.model, model.adapter or manifest.adapter
    if _same_path(path, manifest.model) and _same_path(adapter, manifest.adapter):
        return None
    return replace(model, path=path, adapter=adapter)


def require_same_model(
    settings: Settings, manifest: Manifest, named: ModelOptions, identity: Mapping[str, str]
) -> None:
    """Refuses an align.yaml or ALIGN_MODEL that names another reference than the cache's."""
    if found := _other_than_reference(manifest, identity):
        name = "model.adapter" if _same_path(named.path, manifest.model) else "model.path"
        cached = reference_named(manifest.model, manifest.adapter)
        raise FingerprintError(
            f"{settings.origins[name]}: {name} is {flatten(settings.config)[name]}, but the "
            f"cache's reference is {cached}:{_lines(found)}\n"
            "Make a cache with that model, or set it to the cache's. To train from another model "
            "than the reference, pass --model DIR --set train.other_reference=true."
        )


def _same_path(one: str, other: str) -> bool:
    return one == other or bool(one and other and Path(one).resolve() == Path(other).resolve())


def require_same_reference(
    manifest: Manifest, policy: str, identity: Mapping[str, str], *, may_differ: bool
) -> bool:
    """Whether the policy starts as the reference; another start is refused unless allowed."""
    found = _other_than_reference(manifest, identity)
    if found and not may_differ:
        cached = reference_named(manifest.model, manifest.adapter)
        raise FingerprintError(
            f"The cache was made with {cached}, another reference than {policy}:{_lines(found)}\n"
            "Make a cache with this model, or pass --set train.other_reference=true if the policy "
            "must start as another model."
        )
    return not found


def _other_than_reference(manifest: Manifest, identity: Mapping[str, str]) -> dict[str, str]:
    """The fields in which a model differs from the reference of the cache."""
    return differences({name: manifest.fingerprint[name] for name in identity}, identity)


def _making(manifest: Manifest) -> dict[str, str]:
    """The fields of the fingerprint that decide tokens and log-probs."""
    prefixes = ("model.", "numerics.", "tokenizer.", "tokens.")
    fields = manifest.fingerprint.items()
    return {name: value for name, value in fields if name.startswith(prefixes)}


def require_same_making(manifest: Manifest, other: Manifest, name: str) -> None:
    """Refuses to evaluate on a cache of another reference, or of other tokens."""
    if found := differences(_making(manifest), _making(other)):
        raise FingerprintError(
            f"{name} (train.eval_cache) differs from the cache to train on, whose values come "
            f"first:{_lines(found)}\nMake both with the same model and settings."
        )


def held_out_caches(train: TrainOptions) -> dict[str, tuple[Cache, Manifest]]:
    """The caches of train.eval_cache by name, and their manifests."""
    caches = {name: cache_at(path) for name, path in train.eval_caches}
    return {name: (cache, cache.manifest()) for name, cache in caches.items()}


def _lines(found: Mapping[str, str]) -> str:
    return "".join(f"\n  {line}" for line in found.values())


def require_positions(source: TrainSource, objective: Objective, last: int | None) -> None:
    """Refuses rows longer than the policy's last position; None: it has no limit."""
    if last is None or source.longest <= last:
        return
    more = max(map(len, source.spec.context.values()), default=0)
    added = f", {more} of them of method.good_token in {objective.name}" if more else ""
    raise UsageError(
        f"The longest row of {source.folder.root} has {source.longest:,} tokens{added}, but "
        f"the policy's last position is {last:,}. Make a cache with `align precompute-ref … "
        f"--max-length {last - more} --output OTHER`."
    )
