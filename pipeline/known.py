"""Caches made before, whose scores need not be computed again."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.errors import AlignError, OlderFormatError, UsageError
from ..stages.score.reuse import EarlierCache
from ..stages.storage.cache_folder import CacheFolder
from ..stages.storage.commits import read_commits
from ..stages.storage.manifest_file import load_manifest, load_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..schemas.cache import Manifest, Plan
    from ..schemas.config import CacheOptions
    from ..stages.storage.cache_folder import WorkFolder

logger = logging.getLogger("align")


def candidates(options: CacheOptions, folder: CacheFolder) -> tuple[str, ...]:
    """Folders to look into: the output itself, those the user names, those made before."""
    for name in options.reuse:
        if not CacheFolder(Path(name)).manifest.is_file():
            raise UsageError(f"{name}: no finished cache to reuse (--reuse). Check the path.")
    known = _remembered() if options.reuse_known else []
    named = [str(Path(name).resolve()) for name in [*options.reuse, *known]]
    return tuple(dict.fromkeys([str(folder.root.resolve()), *named]))


def open_earlier(folders: Sequence[str], plan: Plan) -> list[EarlierCache]:
    """Those of the folders that were scored by the same reference and can be read."""
    earlier: list[EarlierCache] = []
    older: list[Path] = []
    for folder in (CacheFolder(Path(name)) for name in folders):
        with _passed_over(folder.root, older):
            earlier += _finished(folder, plan)
        with _passed_over(folder.private, older):
            for work in folder.works():
                with _passed_over(work.root, older):
                    earlier += _begun(work, plan)
    if older:
        logger.warning(
            "%d earlier caches were made by an older align and are not reused: %s. `align inspect` "
            "says how to make one anew.",
            len(older),
            ", ".join(map(str, older)),
        )
    return earlier


def remember(folder: CacheFolder) -> None:
    """Adds a finished cache to this user's list."""
    path = _list_of_caches()
    try:
        place = str(folder.root.resolve())
        if place in _lines():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as lines:
            lines.write(f"{place}\n")
    except (OSError, UnicodeError) as error:  # the cache is published: nothing may fail now
        logger.warning("%s: %s was not added: %s", path, folder.root, error)


@contextmanager
def _passed_over(place: Path, older: list[Path]) -> Iterator[None]:
    """What cannot be read is not reused; that stops no run."""
    try:
        yield
    except OlderFormatError:
        older.append(place)
    except (AlignError, OSError) as error:
        logger.warning("%s is not reused: %s", place, error)


def _finished(folder: CacheFolder, plan: Plan) -> list[EarlierCache]:
    # The output itself, which has the work of this plan, need not be finished; the others were.
    if not folder.manifest.is_file() and folder.work(plan.plan_key).root.is_dir():
        return []
    manifest = load_manifest(folder)
    if not _alike(manifest, plan):
        return []
    same = _same_ring(manifest.fingerprint, plan.fingerprint)
    return [EarlierCache(folder, manifest.shards, same)]


def _begun(work: WorkFolder, plan: Plan) -> list[EarlierCache]:
    other = load_plan(work)
    if other is None or other.plan_key == plan.plan_key or not _alike(other, plan):
        return []
    commits = read_commits(work, len(other.unit_offsets) - 1)
    same = _same_ring(other.fingerprint, plan.fingerprint)
    return [EarlierCache(work.cache, tuple(commits.values()), same)]


def _alike(other: Manifest | Plan, plan: Plan) -> bool:
    return other.reference_key == plan.reference_key


def _same_ring(first: dict[str, str], second: dict[str, str]) -> bool:
    return first["cache.seed"] == second["cache.seed"]


def _remembered() -> list[str]:
    """A cache that has been moved or deleted since is not offered."""
    return [line for line in _lines() if _is_there(CacheFolder(Path(line)))]


def _lines() -> list[str]:
    path = _list_of_caches()
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line]


def _is_there(folder: CacheFolder) -> bool:
    try:
        return folder.manifest.is_file()
    except OSError:  # the line is no path at all
        return False


def _list_of_caches() -> Path:
    home = (
        os.environ.get("ALIGN_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "align"
    )
    return Path(home) / "caches.txt"
