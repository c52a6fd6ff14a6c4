"""Local copies of models, data and caches from buckets; a user may delete any of them.

~/.cache/align/remote/<key>/<name>    a copy; the key is a hash of its objects' versions
~/.cache/align/remote/<key>/.origin   the location of the original, written last
~/.cache/align/remote/work/<key>      the folder of a command whose --output is in a bucket
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.errors import CorruptionError, PathError, UsageError
from ...schemas.json_codec import digest
from ...schemas.safe_text import is_plain_path
from .disk import fs
from .disk.digests import user_folder
from .disk.locks import locked
from .locations import ORIGIN, is_remote, split_url

if TYPE_CHECKING:
    from .remote import Remote


def work_folder(url: str) -> Path:
    """The local folder of a command whose output is in a bucket."""
    folder = _copies() / "work" / digest(split_url(url))[:16]
    for path in (folder.parent, folder, folder / "_align"):
        fs.make_folder(path)
    return folder


def fetch_folder(url: str, choose: Callable[[list[str]], list[str]]) -> Path:
    """A local copy of an object, or of chosen objects below it; made once per version."""
    from .remote import Remote  # noqa: PLC0415 - its library takes a while to import

    remote = Remote(url)
    version = remote.version()
    found = {"": version} if version else remote.list()
    wanted = [""] if version else choose([*found])
    if not wanted:
        raise UsageError(f"{remote.url}: no such file or folder. Check the location.")
    if odd := next((name for name in wanted if name and not is_plain_path(name)), None):
        raise UsageError(f"{remote.url}: {odd!r} is not a file name. Copy it to another key.")
    versions = sorted((name, found[name].size, found[name].etag) for name in wanted)
    return _fetched(remote, versions, wanted, etags={name: found[name].etag for name in wanted})


def fetch_cache(url: str) -> Path:
    """A local copy of a finished cache; its manifest is written last."""
    from .remote import Remote  # noqa: PLC0415 - as above

    remote = Remote(url)
    payload = remote.get("manifest.json")
    if payload is None:
        raise UsageError(
            f"{remote.url} is not a finished cache: it has no manifest.json. Make it with "
            "`align precompute-ref`, or let that command finish."
        )
    files = _files_of(remote, payload)
    folder = _fetched(remote, hashlib.sha256(payload).hexdigest(), files, sha256=files)
    if not (folder / "manifest.json").exists():
        fs.publish(folder / "manifest.json", payload)
    return folder


def damaged_objects(url: str) -> list[str]:
    """A message for each missing or altered file of a finished cache in a bucket."""
    from .remote import FILES_AT_ONCE, Remote  # noqa: PLC0415 - as above

    remote = Remote(url)
    files = _files_of(remote, remote.get("manifest.json") or b"")

    def fault(name: str) -> str:
        found = hashlib.sha256()
        try:
            for chunk in remote.chunks(name):
                found.update(chunk)
        except PathError:
            return f"{remote.at(name)} is missing."
        is_whole = found.hexdigest() == files[name]
        return "" if is_whole else f"{remote.at(name)} was altered: its sha256 differs."

    with ThreadPoolExecutor(FILES_AT_ONCE, "align-fetch") as pool:
        return [one for one in pool.map(fault, files) if one]


def _files_of(remote: Remote, manifest: bytes) -> dict[str, str]:
    """The files of a cache and their digests, from the bytes of its manifest."""
    try:
        listed = json.loads(manifest)
        rejected = [listed["rejected"]] if listed["rejected"] else []
        shards = {f"data/{one['file']}": one["sha256"] for one in listed["shards"]}
        return shards | {one["file"]: one["sha256"] for one in rejected}
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{remote.at('manifest.json')} is damaged: {error}. Restore it from a copy, or make "
            "the cache again."
        ) from error


def manifest_folder(text: str) -> Path:
    """A cache's folder, or a local copy with only its manifest."""
    if not is_remote(text):
        return Path(text)
    return fetch_folder(text, lambda names: [name for name in names if name == "manifest.json"])


def _fetched(
    remote: Remote, key: object, names: Iterable[str], **versions: Mapping[str, str]
) -> Path:
    """The local copy with this key of these objects; `versions` are their digests or ETags."""
    place = _copies() / digest([remote.url, key])[:16]
    folder = place / remote.name
    fs.make_folder(place)
    with locked(place / ".lock"):
        if not (place / ORIGIN).exists():
            targets = {name: folder / name if name else folder for name in names}
            missing = {name: path for name, path in targets.items() if not path.exists()}
            remote.fetch_all(missing, **versions)  # a killed command may have fetched others
            fs.publish(place / ORIGIN, remote.url.encode())
    return folder


def _copies() -> Path:
    """The folder of copies; only its owner can read it, as copies may be private."""
    folder = user_folder() / "remote"
    folder.parent.mkdir(parents=True, exist_ok=True)
    fs.make_folder(folder, 0o700)
    return folder
