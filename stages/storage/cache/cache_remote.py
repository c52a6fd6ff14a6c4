"""A cache that is made in a bucket: machines that share nothing else make it together.

Each works in a folder of its own. The plan, the commits and the manifest are created in the bucket
on the condition that they are absent, and of several the first counts. A shard is uploaded before
the commit that names it, and is removed here once that is in the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ....schemas.cache import Manifest
from ..copies import FILES_AT_ONCE
from ..disk import fs
from .cache_folder import PLAN_NAME, CacheFolder, WorkFolder
from .commits import COMMITS, share_commit


def sync(work: WorkFolder) -> None:
    """Brings the records of this machine and those of the bucket together; the bucket's count."""
    folder, remote = work.cache, work.cache.remote
    stored = remote.list().keys()
    if "manifest.json" in stored and (manifest := remote.get("manifest.json")) is not None:
        if not folder.manifest.exists() or fs.read_bytes(folder.manifest) != manifest:
            fs.publish(folder.manifest, manifest)
        return
    fs.unlink(folder.manifest)  # of a cache that was removed from the bucket
    for other in folder.works():
        if other != work and other.is_planned and _name(other.plan, folder) not in stored:
            fs.remove_tree(other.root)
    _fetch_records(work, stored)
    if work.is_planned and _name(work.plan, folder) not in stored:
        folder.share(work.plan)
    for path in COMMITS.names(work.commits):
        commit = COMMITS.read(path)
        if folder.shard(commit).exists():  # this machine made it and could not share it
            share_commit(work, commit)
        elif _name(path, folder) not in stored:
            fs.unlink(path)


def _fetch_records(work: WorkFolder, stored: Iterable[str]) -> None:
    """Fetches the commits of a plan, and all plans: those of other settings are refused."""
    folder, remote = work.cache, work.cache.remote
    commits = f"{_name(work.commits, folder)}/"
    names = [name for name in stored if name.endswith(f"/{PLAN_NAME}") or name.startswith(commits)]

    def fetch(name: str) -> None:
        (folder.root / name).parent.mkdir(parents=True, exist_ok=True)
        remote.fetch(name, folder.root / name)

    with ThreadPoolExecutor(FILES_AT_ONCE, "align-fetch") as pool:
        for _ in pool.map(fetch, [name for name in names if not (folder.root / name).exists()]):
            pass


def remove_work(folder: CacheFolder, manifest: Manifest, own: WorkFolder) -> bool:
    """Removes work in progress and unnamed shards from the bucket; whether the own work was there.

    Plans go first, so that nobody takes up the rest.
    """
    doomed = unneeded(folder, manifest)
    plans = {name for name in doomed if name.endswith(f"/{PLAN_NAME}")}
    folder.remote.delete(plans)
    folder.remote.delete(doomed - plans)
    return _name(own.plan, folder) in plans


def unneeded(folder: CacheFolder, manifest: Manifest) -> set[str]:
    """The objects that a finished cache does not need."""
    named = {f"data/{shard.file}" for shard in manifest.shards} | {"manifest.json"}
    named |= {manifest.rejected.file} if manifest.rejected else set()
    return folder.remote.list().keys() - named


def _name(path: Path, folder: CacheFolder) -> str:
    return path.relative_to(folder.root).as_posix()
