"""The fingerprint of a cache, and the earlier caches whose scores it may reuse."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ...schemas.cache import FORMAT_VERSION, Commit, Manifest, Plan
from ...schemas.config import CacheOptions, Config
from ...schemas.errors import AlignError, FingerprintError, UsageError
from ...stages.score.reuse import EarlierCache
from ...stages.storage.cache.cache_folder import CacheFolder
from ...stages.storage.cache.commits import read_commits
from ...stages.storage.cache.manifest_file import PLANS, load_manifest
from ...stages.storage.copies import manifest_folder
from ...stages.storage.disk.digests import user_folder
from ...stages.storage.locations import is_remote
from ..jobs.differences import differences
from ..jobs.object_inputs import cache_at
from ..options.declared import bound
from ..options.settings import flatten

logger = logging.getLogger("align")

FILES = "data.files"


def fingerprint(
    config: Config,
    *,
    files: str,
    shape: str,
    tokenizer: Mapping[str, str],
    model: Mapping[str, str],
    has_turns: bool,
) -> dict[str, str]:
    """Everything that the bytes of the cache depend on, by name."""
    wrap, learn, settings = config.data.wrap, config.tokens.learn, flatten(config)
    return {
        "format": str(FORMAT_VERSION),
        FILES: files,
        "data.shape": shape,
        **({"data.wrap": wrap} if wrap == "chat" else {}),  # the others leave text as it is
        **({"tokens.learn": learn} if has_turns and learn != "all" else {}),
        **tokenizer,
        **{name: _text(settings[name]) for name in bound(settings, "cache")},
        **model,
    }


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


def candidates(options: CacheOptions) -> tuple[str, ...]:
    """Folders to search: those the user names, then those in the registry."""
    for name in options.reuse:
        folder = CacheFolder(manifest_folder(name))
        if not (folder.manifest.is_file() or any(work.is_planned for work in folder.works())):
            raise UsageError(f"{name}: no cache to reuse (--reuse). Check the path.")
    known = filter(_is_there, _lines()) if options.reuse_known else ()
    paths = (one if is_remote(one) else str(Path(one).resolve()) for one in options.reuse)
    return tuple(dict.fromkeys([*paths, *known]))


def open_earlier(folders: Sequence[str], plan: Plan) -> list[EarlierCache]:
    """The readable caches among the folders that the same reference scored."""
    earlier: list[EarlierCache] = []
    for name in folders:
        try:
            folder = cache_at(name)
            for made, shards in _scored(folder):
                if made.reference_key == plan.reference_key:
                    earlier.append(EarlierCache(folder, shards))
        except (AlignError, OSError) as error:
            logger.warning("%s is not reused: %s", name, error)
    return earlier


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


def may_have_scores(folders: Sequence[str], reference_key: str) -> bool:
    """Whether one of the folders is of this reference; nothing is said of those that are broken."""
    for name in folders:
        with suppress(AlignError, OSError):
            scored = _scored(CacheFolder(manifest_folder(name)))
            if any(made.reference_key == reference_key for made, _ in scored):
                return True
    return False


def register_cache(folder: CacheFolder) -> None:
    """Adds a finished cache to this user's registry, unless it is in a bucket."""
    if folder.url:
        return
    path = _list_of_caches()
    try:
        root = str(folder.root.resolve())
        if root not in _lines():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{root}\n")
    except (AlignError, OSError, UnicodeError) as error:  # the cache is published: nothing may fail
        logger.warning("%s: %s was not added: %s", path, folder.root, error)


def _lines() -> list[str]:
    path = _list_of_caches()
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line]


def _is_there(line: str) -> bool:
    try:
        return CacheFolder(Path(line)).manifest.is_file()
    except OSError:  # the line is not a path
        return False


def _list_of_caches() -> Path:
    return user_folder() / "caches.txt"
