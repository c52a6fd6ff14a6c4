"""Opens the inputs of a new cache: data, tokenizer, reference, fingerprint, earlier caches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ...schemas.cache import FORMAT_VERSION, file_identity
from ...schemas.config import CacheOptions, Config
from ...schemas.errors import AlignError, FingerprintError, UsageError, differences
from ...schemas.json_codec import digest
from ...schemas.rows import Reference
from ...stages.data.columns import common_shape, require_scores
from ...stages.data.encode import has_turns
from ...stages.data.files import Digested, InputFile, digested, inputs_of
from ...stages.data.shapes import Shape
from ...stages.data.text_rows import first_text_rows
from ...stages.data.tokenizer import TextTokenizer, load_tokenizer, tokenizer_fingerprint
from ...stages.model.model_folder import require_peft
from ...stages.score.reuse import EarlierCache
from ...stages.storage.cache import Cache
from ...stages.storage.cache_work import CacheWork, unfinished_work
from ...stages.storage.copies import manifest_folder
from ...stages.storage.disk.digests import user_folder
from ...stages.storage.locations import is_remote
from ..jobs.object_inputs import cache_at
from ..options.settings import flatten
from ..options.settings_table import settings_to_match
from ..parts import Part
from ..ray_actors import require_executor

logger = logging.getLogger("align")

STAGE_ONE = "precompute-ref"


@dataclass(frozen=True)
class CacheJob:
    """The inputs and settings of a new cache, before the first row is encoded."""

    config: Config
    reference: Reference
    cache: CacheWork
    inputs: tuple[InputFile, ...]  # in the order of their digests
    digested: tuple[Digested, ...]  # the digests of the inputs
    shape: Shape
    tokenizer: TextTokenizer
    fingerprint: dict[str, str]  # all values, by name, that decide the bytes of the cache
    reference_key: str

    @property
    def device(self) -> str:
        """The device of the reference."""
        return self.fingerprint.get("model.device", "cpu")

    @property
    def files(self) -> tuple[int, ...]:
        """The identity of each input."""
        return tuple(file_identity(file.sha256) for file in self.digested)

    @property
    def paths(self) -> dict[int, Path]:
        """The path of each data file by its identity; the last one of files with equal bytes."""
        return {identity: file.path for identity, file in zip(self.files, self.inputs, strict=True)}

    @property
    def is_published(self) -> bool:
        """Whether the folder already holds the finished cache of this job."""
        cache = self.cache
        return cache.manifest_file.exists() and cache.manifest().plan_key == cache.plan_key


def require_model(config: Config, part: Part | None = None) -> None:
    """Refuses settings that are wrong for any data and model."""
    if not config.model.path:
        raise UsageError(
            "No reference model. Pass --model DIR, set ALIGN_MODEL, or run `align init` and set "
            "model.path in align.yaml."
        )
    if config.model.adapter:
        require_peft()
    if config.cache.token_logps and not config.cache.scored:
        raise UsageError("cache.token_logps is true, but cache.scored is false. Unset one of them.")
    if config.cache.reuse and not config.cache.scored:
        raise UsageError(
            "cache.reuse names scores to copy, but cache.scored is false. Leave out --reuse or "
            "--no-scored."
        )
    require_executor(config.scoring, part)


def identity_of(reference: Reference, config: Config) -> dict[str, str]:
    """All values that decide a score; empty for a cache without scores."""
    return dict(reference.identity()) | ({} if config.cache.scored else {"cache.scored": "false"})


def open_job(config: Config, reference: Reference, stage: str = STAGE_ONE) -> CacheJob:
    """Opens the data, the tokenizer and the reference; writes nothing into the output.

    `stage` is the command; in other commands than STAGE_ONE, completions may lack scores.
    """
    opened = inputs_of(config.data)
    tokenizer = load_tokenizer(config.model.path, config.tokens)
    reference.hidden_size()  # fails early if a device or a config is missing
    # By digest, then by name: the order of files in the command has no effect.
    found = [(digested(file), file) for file in opened]
    found.sort(key=lambda each: (each[0].sha256, each[1].path.name))
    inputs, before = tuple(file for _, file in found), tuple(one for one, _ in found)
    shape = common_shape(inputs, config.data.map, config.data.carry)
    if stage == STAGE_ONE:
        require_scores(inputs, shape)
    wrap, learn = config.data.wrap, config.tokens.learn
    shape = replace(shape, wrap=tokenizer.wrapping(wrap))
    first = [*first_text_rows(inputs, shape)]
    if any(row.is_conversation for row in first):
        tokenizer.require_template()

    identity, settings = identity_of(reference, config), flatten(config)
    fields = {
        "format": str(FORMAT_VERSION),
        "data.files": digest([file.sha256 for file in before]),
        "data.shape": digest(
            {"kind": shape.name, "source": shape.source, "carried": shape.carried}
        ),
        **({"data.wrap": wrap} if wrap == "chat" else {}),  # other values do not change text
        **({"tokens.learn": learn} if learn != "all" and any(map(has_turns, first)) else {}),
        **tokenizer_fingerprint(tokenizer),
    }
    for name in settings_to_match(settings, "cache"):
        value = settings[name]
        fields[name] = str(value).lower() if isinstance(value, bool) else str(value)
    fields |= identity
    return CacheJob(
        config=config,
        reference=reference,
        cache=CacheWork.at(config.cache.output, digest(fields)),
        inputs=inputs,
        digested=before,
        shape=shape,
        tokenizer=tokenizer,
        fingerprint=fields,
        reference_key=digest(identity),
    )


def require_same(
    stored: Mapping[str, str],
    wanted: Mapping[str, str],
    *,
    where: str,
    models: tuple[str, str],
    reuse: str = "",
) -> None:
    """Refuses settings that differ from a cache's.

    `models` are its model and the given one; `reuse` is its folder if it is unfinished.
    """
    if found := differences(stored, wanted):
        lines = "\n  ".join(found.values())
        takes_it = reuse and wanted.get("cache.scored") != "false"
        other = f"Give --output OTHER --reuse {reuse}" if takes_it else "Choose another --output"
        cost = "common scores are copied"
        what = "other settings"
        if {name.partition(".")[0] for name in found} & {"model", "numerics", "imported"}:
            if models[0] != models[1]:
                what = f"{models[0]}, not with {models[1]}"
            other = "Choose another --output"
            cost = "its log-probs have another source, so none is copied"
        raise FingerprintError(
            f"{where} was made with {what}:\n  {lines}\n{other} ({cost}), or undo the change."
        )


# Earlier caches


def candidates(options: CacheOptions) -> tuple[str, ...]:
    """The folders to search: named ones, then those of this user's earlier caches."""
    for name in options.reuse:
        cache = Cache(manifest_folder(name))
        is_planned = any(work.plan.is_file() for work in unfinished_work(cache))
        if not (cache.manifest_file.is_file() or is_planned):
            raise UsageError(f"{name}: no cache to reuse (--reuse). Check the path.")
    known = []
    for line in _registered() if options.reuse_known else ():
        with suppress(OSError):  # the line is not a path
            if Cache(Path(line)).manifest_file.is_file():
                known.append(line)
    paths = (one if is_remote(one) else str(Path(one).resolve()) for one in options.reuse)
    return tuple(dict.fromkeys([*paths, *known]))


def open_earlier(folders: Iterable[str], reference_key: str) -> list[EarlierCache]:
    """The readable caches among the folders with scores of this reference."""
    earlier: list[EarlierCache] = []
    for name in folders:
        try:
            earlier += _scored_by(reference_key, cache_at(name))
        except (AlignError, OSError) as error:
            logger.warning("%s is not reused: %s", name, error)
    return earlier


def may_have_scores(folders: Iterable[str], reference_key: str) -> bool:
    """Whether a folder has scores of this reference; `open_earlier` warns of broken ones."""
    for name in folders:
        with suppress(AlignError, OSError):
            if _scored_by(reference_key, Cache(manifest_folder(name))):
                return True
    return False


def _scored_by(reference_key: str, cache: Cache) -> list[EarlierCache]:
    """The shards of a cache, or those of its unfinished plans, if this reference scored them."""
    works = unfinished_work(cache)
    if cache.manifest_file.is_file() or not works:
        manifest = cache.manifest()
        made = [(manifest.reference_key, manifest.shards)]
    else:
        planned = [(work, plan) for work in works if (plan := work.find_plan())]
        made = [
            (plan.reference_key, tuple(work.done(is_own=False).values())) for work, plan in planned
        ]
    return [EarlierCache(cache, shards) for key, shards in made if key == reference_key]


def register_cache(cache: CacheWork) -> None:
    """Adds a finished cache to this user's list, unless it is in a bucket."""
    if cache.url:
        return
    path = user_folder() / "caches.txt"
    try:
        root = str(cache.root.resolve())
        if root not in _registered():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{root}\n")
    except (AlignError, OSError, UnicodeError) as error:  # only logged: the cache is published
        logger.warning("%s: %s was not added: %s", path, cache.root, error)


def _registered() -> list[str]:
    path = user_folder() / "caches.txt"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [line for line in text.splitlines() if line]
