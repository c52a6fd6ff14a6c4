"""Opens a cache to be made: its data, tokenizer, reference and fingerprint; and earlier caches."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...schemas.cache import FORMAT_VERSION, Commit, Manifest, Plan, file_identity
from ...schemas.config import CacheOptions, Config
from ...schemas.errors import AlignError, FingerprintError, UsageError
from ...schemas.json_codec import digest
from ...schemas.rows import Reference
from ...stages.data.columns import common_shape, require_scores, require_whole
from ...stages.data.encode import has_turns
from ...stages.data.files import Digested, InputFile, digested, inputs_of, require_one_split
from ...stages.data.records import first_records
from ...stages.data.shapes import Shape
from ...stages.data.tokenizer import TextTokenizer, load_tokenizer, tokenizer_fingerprint
from ...stages.model.loading.model_folder import require_peft
from ...stages.score.reuse import EarlierCache
from ...stages.storage.cache.cache_folder import CacheFolder, WorkFolder
from ...stages.storage.cache.commits import read_commits
from ...stages.storage.cache.manifest_file import PLANS, load_manifest
from ...stages.storage.copies import manifest_folder
from ...stages.storage.disk.digests import user_folder
from ...stages.storage.locations import is_remote
from ..jobs.differences import differences
from ..jobs.object_inputs import cache_at
from ..options.declared import bound
from ..options.settings import flatten
from ..parts import Part
from ..ray_actors import require_executor

logger = logging.getLogger("align")

STAGE_ONE = "precompute-ref"


@dataclass(frozen=True)
class CacheJob:
    """Everything that is known before the first row is encoded."""

    config: Config
    reference: Reference
    folder: CacheFolder
    inputs: tuple[InputFile, ...]  # in the order of their digests, however they were named
    digested: tuple[Digested, ...]  # the inputs, before anything else was read from them
    shape: Shape
    tokenizer: TextTokenizer
    fingerprint: dict[str, str]  # everything that the bytes of the cache depend on, by name
    plan_key: str
    reference_key: str
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])  # of its drafts

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
        """The path of each data file by its identity; of files with equal bytes the last."""
        return {identity: file.path for identity, file in zip(self.files, self.inputs, strict=True)}

    @property
    def work(self) -> WorkFolder:
        """The folder of unfinished work."""
        return self.folder.work(self.plan_key)

    @property
    def is_published(self) -> bool:
        """Whether the folder already holds the finished cache of this job."""
        folder = self.folder
        return folder.manifest.exists() and load_manifest(folder).plan_key == self.plan_key


def require_model(config: Config, part: Part | None = None) -> None:
    """Refuses what the settings alone get wrong, before data or a model are looked at."""
    if not config.model.path:
        raise UsageError(
            "No reference model. Pass --model DIR, set ALIGN_MODEL, or run `align init` and set "
            "model.path in align.yaml."
        )
    if config.model.adapter:
        require_peft()
    require_executor(config.scoring, part)


def open_job(config: Config, reference: Reference, stage: str = STAGE_ONE) -> CacheJob:
    """Opens the data, the tokenizer and the reference; writes nothing.

    `stage` is the command: where it is not STAGE_ONE, completions may have no scores yet.
    """
    opened = inputs_of(config.data)
    if stage == STAGE_ONE:
        require_one_split(opened)
    tokenizer = load_tokenizer(config.model.path, config.tokens)
    reference.hidden_size()  # before bytes are digested: a device or a config may be missing
    # By digest, then by name: the order in which files were given has no effect.
    found = [(digested(file), file) for file in opened]
    found.sort(key=lambda each: (each[0].sha256, each[1].path.name))
    inputs, before = tuple(file for _, file in found), tuple(one for one, _ in found)
    shape = common_shape(inputs, config.data.map, config.data.carry)
    require_whole(inputs, shape)
    if stage == STAGE_ONE:
        require_scores(inputs, shape)
    wrap, learn = config.data.wrap, config.tokens.learn
    shape = replace(shape, wrap=tokenizer.wrapping(wrap))
    first = [*first_records(inputs, shape)]
    if any(record.is_conversation for record in first):
        tokenizer.require_template()
    identity, settings = dict(reference.identity()), flatten(config)
    fields = {
        "format": str(FORMAT_VERSION),
        "data.files": digest([file.sha256 for file in before]),
        "data.shape": digest(
            {"kind": shape.kind, "source": shape.source, "carried": shape.carried}
        ),
        **({"data.wrap": wrap} if wrap == "chat" else {}),  # the others leave text as it is
        **({"tokens.learn": learn} if learn != "all" and any(map(has_turns, first)) else {}),
        **tokenizer_fingerprint(tokenizer),
        **{name: _text(settings[name]) for name in bound(settings, "cache")},
        **identity,
    }
    return CacheJob(
        config=config,
        reference=reference,
        folder=CacheFolder.at(config.cache.output),
        inputs=inputs,
        digested=before,
        shape=shape,
        tokenizer=tokenizer,
        fingerprint=fields,
        plan_key=digest(fields),
        reference_key=digest(identity),
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def require_same(
    stored: Mapping[str, str], wanted: Mapping[str, str], *, where: str, reuse: str = ""
) -> None:
    """Refuses settings that would make it another cache; `reuse` is its folder if unfinished."""
    if found := differences(stored, wanted):
        lines = "\n  ".join(found.values())
        other = f"Give --output OTHER --reuse {reuse}" if reuse else "Choose another --output"
        cost = "scores that both need are copied, not computed again"
        if {name.partition(".")[0] for name in found} & {"model", "numerics"}:
            other = "Choose another --output"
            cost = "the reference differs, so everything is scored again there"
        raise FingerprintError(
            f"{where} was made with other settings. What differs:\n  {lines}\n"
            f"{other} ({cost}), or undo the change."
        )


# Earlier caches


def candidates(options: CacheOptions) -> tuple[str, ...]:
    """Folders to search: those the user names, then those that this user has made before."""
    for name in options.reuse:
        folder = CacheFolder(manifest_folder(name))
        if not (folder.manifest.is_file() or any(work.is_planned for work in folder.works())):
            raise UsageError(f"{name}: no cache to reuse (--reuse). Check the path.")
    known = filter(_is_cache, _registered()) if options.reuse_known else ()
    paths = (one if is_remote(one) else str(Path(one).resolve()) for one in options.reuse)
    return tuple(dict.fromkeys([*paths, *known]))


def open_earlier(folders: Sequence[str], reference_key: str) -> list[EarlierCache]:
    """The readable caches among the folders that the same reference scored."""
    earlier: list[EarlierCache] = []
    for name in folders:
        try:
            folder = cache_at(name)
            scored = _scored(folder)
            earlier += [
                EarlierCache(folder, shards)
                for made, shards in scored
                if made.reference_key == reference_key
            ]
        except (AlignError, OSError) as error:
            logger.warning("%s is not reused: %s", name, error)
    return earlier


def may_have_scores(folders: Sequence[str], reference_key: str) -> bool:
    """Whether one of the folders is of this reference; nothing is said of those that are broken."""
    for name in folders:
        with suppress(AlignError, OSError):
            scored = _scored(CacheFolder(manifest_folder(name)))
            if any(made.reference_key == reference_key for made, _ in scored):
                return True
    return False


def _scored(folder: CacheFolder) -> Iterator[tuple[Manifest | Plan, tuple[Commit, ...]]]:
    """The shards of a cache, of each plan if it is unfinished, and what they were made by."""
    works = folder.works()
    if folder.manifest.is_file() or not works:
        manifest = load_manifest(folder)
        yield manifest, manifest.shards
        return
    for work in works:
        if plan := PLANS.find(work.plan):
            yield plan, tuple(read_commits(work, is_own=False).values())


def register_cache(folder: CacheFolder) -> None:
    """Adds a finished cache to this user's list, unless it is in a bucket."""
    if folder.url:
        return
    path = _list_of_caches()
    try:
        root = str(folder.root.resolve())
        if root not in _registered():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{root}\n")
    except (AlignError, OSError, UnicodeError) as error:  # the cache is published: nothing may fail
        logger.warning("%s: %s was not added: %s", path, folder.root, error)


def _registered() -> list[str]:
    path = _list_of_caches()
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line]


def _is_cache(line: str) -> bool:
    try:
        return CacheFolder(Path(line)).manifest.is_file()
    except OSError:  # the line is not a path
        return False


def _list_of_caches() -> Path:
    return user_folder() / "caches.txt"
