"""Locations: paths, keys of a bucket (`s3://`, `gs://`, `az://`), or addresses of the Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, TypeAlias

from ...schemas.errors import UsageError
from ...schemas.safe_text import mask_secrets_of
from .disk import fs
from .disk.digests import user_folder

SCHEMES = ("s3", "gs", "az")
ORIGIN = ".origin"  # the file in a copy that says where it is from
HUB = "hf://"
Kind: TypeAlias = Literal["model", "dataset"]  # of a repository on the Hub
PREFIXES: dict[Kind, str] = {"model": "", "dataset": "datasets/"}
# owner/name[@revision], which is no name of a file of data.
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-][\w./%-]*)?", re.ASCII)
_FILE = re.compile(r"[^@]*\.(parquet|arrow|feather|ipc|jsonl?|ndjson|csv|tsv|gz|zst|txt)")
_SNAPSHOT = re.compile(r"(model|dataset)s--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})(/.+)?")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", re.ASCII)


def is_remote(text: str | Path) -> bool:
    """Whether a text is a location in a bucket or on the Hub rather than a path."""
    return isinstance(text, str) and _URL.fullmatch(text) is not None


def address_of(text: str, kind: Kind, folder: Path = Path()) -> str:
    """The Hub's address of a plain `owner/name`, if the folder has no such file; else the text."""
    if not _REPO.fullmatch(text) or _FILE.fullmatch(text) or (folder / text).exists():
        return text
    return f"{HUB}{PREFIXES[kind]}{text}"


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
    if url.lower().startswith(HUB):
        raise UsageError(
            f"{url}: only models and data are read from the Hub. Give a path, s3://, gs:// or "
            "az://; `align push` copies a trained model to the Hub."
        )
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
    if found := _SNAPSHOT.search(path):
        from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - only the Hub needs it

        # The path as it is: files in a snapshot are links to files with other names.
        if Path(path[: found.start()]).resolve() == Path(HF_HUB_CACHE).resolve():
            kind, owner, name, commit, within = found.groups("")
            return f"{HUB}{'datasets/' * (kind == 'dataset')}{owner}/{name}@{commit}{within}"
    copies, absolute = (user_folder() / "remote").resolve(), Path(path).resolve()
    if not absolute.is_relative_to(copies):
        return path
    key, *inside = absolute.relative_to(copies).parts or ("",)
    origin = copies / key / ORIGIN
    if not (inside and origin.is_file()):
        return path
    return "/".join([fs.read_bytes(origin).decode(), *inside[1:]])
