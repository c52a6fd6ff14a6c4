"""What must hold before the first step: the cache is of this text and of this reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.config import TokenOptions
from ..schemas.errors import FingerprintError
from ..stages.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from ..stages.model.fingerprint import (
    adapter_digest,
    code_digest,
    config_digest,
    weights_digest,
)
from .identity import differences
from .settings import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..schemas.cache import Manifest
    from ..schemas.config import ModelOptions
    from .settings import Settings

# Parts of a fingerprint that two caches share when their numbers can be compared.
MAKING = {"model", "numerics", "tokenizer", "tokens"}


def require_same_text(
    manifest: Manifest, policy: str, tokens: TokenOptions, given: Mapping[str, str]
) -> None:
    """Refuses a cache whose ids the policy would read as other text.

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


def policy_identity(model: ModelOptions) -> dict[str, str]:
    """Digests of the files that a policy is loaded from."""
    return {
        "model.weights": weights_digest(model.path),
        "model.config": config_digest(model.path),
        "model.adapter": adapter_digest(model.adapter) if model.adapter else "none",
        "model.code": code_digest(model.path) if model.trust_remote_code else "none",
    }


def require_same_model(settings: Settings, manifest: Manifest) -> None:
    """Refuses an align.yaml or ALIGN_MODEL that names another reference than the cache's."""
    model = settings.config.model
    wanted = replace(
        model, path=model.path or manifest.model, adapter=model.adapter or manifest.adapter
    )
    if _same_place(wanted.path, manifest.model) and _same_place(wanted.adapter, manifest.adapter):
        return
    if found := _other_than_reference(manifest, policy_identity(wanted)):
        name = "model.adapter" if _same_place(wanted.path, manifest.model) else "model.path"
        origin, value = settings.origins[name], flatten(settings.config)[name]
        raise FingerprintError(
            f"{origin}: {name} is {value}, and the reference of the cache is {manifest.model}"
            f"{f' with {manifest.adapter}' if manifest.adapter else ''}:{_lines(found)}\n"
            "Make a cache with that model, or set it to the cache's. To train from another model "
            "than the reference, pass --model DIR --set train.other_reference=true."
        )


def _same_place(one: str, other: str) -> bool:
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
    """Field by field, how a model differs from the reference the cache was made with."""
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
            f"{name} (train.eval_cache) was made otherwise than the cache to train on; first this "
            f"one, then that:{_lines(found)}\nMake both with the same model and settings."
        )


def _lines(found: Mapping[str, str]) -> str:
    return "".join(f"\n  {line}" for line in found.values())
