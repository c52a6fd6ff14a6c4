"""Digests of files, cached per user in one small JSON file per digested file.

A cached digest is valid while the file's device, inode, size, mtime and ctime stay the same. A
file that changed less than two seconds before it was digested is not cached: it may change again
and keep its times.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from functools import cache, partial
from pathlib import Path

from ....schemas.file_version import FileVersion, Remember
from . import fs

logger = logging.getLogger("align")

SETTLED_NS = 2_000_000_000  # some file systems store times in steps of two seconds


def user_folder() -> Path:
    """The folder of this user's list of caches and cached digests."""
    named = os.environ.get("ALIGN_HOME")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "align"


def own_digests() -> Remember:
    """A function that returns a file's digests from this user's cache, or computes them."""
    return partial(remembered, user_folder() / "digests")


def remembered(folder: Path, file: Path, compute: Callable[[], list[str]]) -> list[str]:
    """The digests of this version of a file, from the folder or from `compute`."""
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]
    kept = folder / f"{name}.json"
    before, now_ns = FileVersion.of(file), time.time_ns()
    version = [*astuple(before)]
    with suppress(OSError, ValueError, KeyError, TypeError):  # no usable cached digest
        known = json.loads(kept.read_bytes())
        if known["version"] == version:
            stored: list[str] = known["digests"]
            return stored
    digests = compute()
    is_settled = now_ns - max(before.modified_ns, before.changed_ns) >= SETTLED_NS
    if is_settled and FileVersion.of(file) == before:
        draft = kept.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"version": version, "digests": digests}))
            draft.replace(kept)  # not synced: a lost file is only computed again
        except OSError as error:
            _warn_once(folder, error.strerror or "")
    return digests


@cache
def _warn_once(folder: Path, why: str) -> None:
    logger.warning("%s: digests are not cached: %s", folder, why)


def remembered_sha256(path: Path, remember: Remember) -> str:
    """The digest of a file's bytes."""
    (sha256,) = remember(path, lambda: [fs.sha256_of(path)])
    return sha256
