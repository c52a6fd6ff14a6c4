"""Checks of a cache against the policy that is trained on it: text, reference and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.cache import Manifest
from ...schemas.config import ModelOptions
from ...schemas.data_options import TokenOptions
from ...schemas.errors import FingerprintError, UsageError, differences
from ...stages.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from ...stages.feed.train_source import TrainSource
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
    return differences({name: manifest.fingerprint[name] for name in identity}, identity)


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


def require_positions(source: TrainSource, recipe: Recipe, last: int | None) -> None:
    """Refuses rows longer than the policy's last position; None: it has no limit."""
    if last is None or source.longest <= last:
        return
    more = max(map(len, source.spec.context.values()), default=0)
    added = (
        f", {more} of them those that {recipe.name} puts behind a prompt (method.good_token and "
        "method.bad_token)"
        if more
        else ""
    )
    raise UsageError(
        f"The longest row of {source.folder.root} has {source.longest:,} tokens{added}, and "
        f"the policy's last position is {last:,}. Make a cache with `align precompute-ref … "
        f"--max-length {last - more} --output OTHER`."
    )
