"""Caches made before, whose scores need not be computed again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.errors import AlignError, UsageError
from ..stages.score.reuse import EarlierCache
from ..stages.storage.commits import read_commits
from ..stages.storage.layout import CacheFolder
from ..stages.storage.manifest import load_manifest, load_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..schemas.config import CacheOptions
    from ..schemas.manifest import Manifest, Plan


def candidates(options: CacheOptions, folder: CacheFolder) -> tuple[str, ...]:
    """Folders to look into: the output itself, those the user names, those made before."""
    for name in options.reuse:
        if not CacheFolder(Path(name)).manifest.is_file():
            raise UsageError(f"{name}: no finished cache to reuse (--reuse). Check the path.")
    known = _remembered() if options.reuse_known else []
    named = [str(Path(name).resolve()) for name in [*options.reuse, *known]]
    return tuple(dict.fromkeys([str(folder.root.resolve()), *named]))


def open_earlier(folders: Sequence[str], plan: Plan) -> list[EarlierCache]:
    """Those of the folders that were scored by the same reference."""
    return [cache for name in folders for cache in _scored_alike(CacheFolder(Path(name)), plan)]


def remember(folder: CacheFolder) -> None:
    """Adds a finished cache to this user's list."""
    path = _list_of_caches()
    place = str(folder.root.resolve())
    if place in _remembered():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(f"{place}\n")


def _scored_alike(folder: CacheFolder, plan: Plan) -> Iterator[EarlierCache]:
    if folder.manifest.is_file():
        manifest = load_manifest(folder)
        if _alike(manifest, plan):
            same = _same_ring(manifest.fingerprint, plan.fingerprint)
            yield EarlierCache(folder, manifest.shards, same)
    for work in folder.works():
        other = load_plan(work)
        if other and other.plan_key != plan.plan_key and _alike(other, plan):
            commits = read_commits(work, len(other.unit_offsets) - 1)
            same = _same_ring(other.fingerprint, plan.fingerprint)
            yield EarlierCache(folder, tuple(commits.values()), same)


def _alike(other: Manifest | Plan, plan: Plan) -> bool:
    return other.reference_key == plan.reference_key


def _same_ring(first: dict[str, str], second: dict[str, str]) -> bool:
    return first["cache.seed"] == second["cache.seed"]


def _remembered() -> list[str]:
    path = _list_of_caches()
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if _is_usable(CacheFolder(Path(line)))]


def _is_usable(folder: CacheFolder) -> bool:
    """A cache that has been moved, deleted or damaged since is not offered."""
    try:
        return folder.manifest.is_file() and bool(load_manifest(folder).root)
    except (AlignError, OSError):
        return False


def _list_of_caches() -> Path:
    home = (
        os.environ.get("ALIGN_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "align"
    )
    return Path(home) / "caches.txt"
