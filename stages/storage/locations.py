"""Locations of models, data, caches and runs: paths, or keys of a bucket (`s3://`, `gs://`, `az://`)."""

from __future__ import annotations

import re
from pathlib import Path

from ...schemas.errors import UsageError
from ...schemas.safe_text import mask_secrets_of
from .disk import fs
from .disk.digests import user_folder

SCHEMES = ("s3", "gs", "az")
ORIGIN = ".origin"  # the file in a copy that says where it is from
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", re.ASCII)


def is_remote(text: str | Path) -> bool:
    """Whether a text is a location in a bucket rather than a path."""
    return isinstance(text, str) and _URL.fullmatch(text) is not None


def require_on_disk(text: str, what_is: str) -> Path:
    """The path of an output; refuses a bucket."""
    if is_remote(text):
        raise UsageError(f"{text}: {what_is} written to a disk. Choose an --output there.")
    return Path(text)


def split_url(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and key of a location."""
    found = _URL.fullmatch(url)
    assert found, url
    mask_secrets_of(url)
    scheme, rest = found[1].lower(), found[2]
    bucket, _, key = rest.partition("/")
    parts = [part for part in key.split("/") if part]
    if scheme not in SCHEMES:
        raise UsageError(
            f"{url}: {scheme}:// is not supported. Give a path, s3://, gs:// or az://."
        )
    if set(rest) & set("@?#"):
        raise UsageError(
            f"{url}: a location is a bucket and a key only. Set credentials in the environment or "
            "~/.aws, and the server in AWS_ENDPOINT_URL."
        )
    if not _BUCKET.fullmatch(bucket) or {".", ".."} & {*parts} or not rest.isprintable():
        raise UsageError(f"{url}: not a bucket and a key. Write {scheme}://BUCKET/KEY.")
    return scheme, bucket, "/".join(parts)


def origin_of(path: str) -> str:
    """The location of which a local path is a copy; the path itself if it is not a copy."""
    copies, absolute = (user_folder() / "remote").resolve(), Path(path).resolve()
    if not absolute.is_relative_to(copies):
        return path
    key, *inside = absolute.relative_to(copies).parts or ("",)
    origin = copies / key / ORIGIN
    if not (inside and origin.is_file()):
        return path
    return "/".join([fs.read_bytes(origin).decode(), *inside[1:]])
