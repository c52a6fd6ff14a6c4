"""The objects of a bucket, by obstore.

An object is written atomically and is durable when its request returns. Objects are never renamed
or copied, because those requests take no condition. Credentials come from the environment, from a
profile in `~/.aws`, or from the machine, and are never stored or shown.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from ...schemas.errors import CorruptionError, PathError, StorageError, UsageError
from ...schemas.safe_text import mask_secret, mask_secrets_of, redacted
from .disk import fs
from .locations import split_url

if TYPE_CHECKING:
    from obstore.store import S3Credential

logger = logging.getLogger("align")

ObjectStore: TypeAlias = AzureStore | GCSStore | S3Store

ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
PAUSES = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0)  # seconds before each try of a conditional write
CHUNK = 8 << 20
CHUNKS_AT_ONCE = 2  # of one file
FILES_AT_ONCE = 16
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
_FAILURES = (exceptions.BaseError, OSError, ValueError)
_FINAL = (  # errors that a retry cannot change
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.NotSupportedError,
    exceptions.InvalidPathError,
    exceptions.UnknownConfigurationKeyError,
    PermissionError,
)


@dataclass(frozen=True)
class Version:
    """The version of an object when it was listed."""

    size: int
    etag: str


class Remote:
    """The objects below one location of a bucket, by the rest of their keys; "" is the location."""

    def __init__(self, url: str) -> None:
        scheme, self._bucket, self._prefix = split_url(url)
        self.url = f"{scheme}://{self._bucket}/{self._prefix}".rstrip("/")
        self.name = PurePosixPath(self._prefix).name or self._bucket
        self._store = open_bucket(scheme, self._bucket)

    def put_new(self, name: str, payload: bytes) -> bool:
        """Writes an object unless there is one; returns whether it has these bytes now.

        The store may write an object and lose the response, so a failed write is read back: equal
        bytes mean success.
        """
        for number, pause in enumerate(PAUSES):
            time.sleep(pause)
            if number and (found := self.get(name)) is not None:
                return found == payload
            try:
                obstore.put(
                    self._store, self._key(name), payload, mode="create", use_multipart=False
                )
            except _FAILURES as error:
                failure = self._failure("write", name, error)
                if isinstance(error, _FINAL) or isinstance(failure, PathError):
                    raise failure from None
            else:
                return True
        raise failure from None

    def put(self, name: str, payload: bytes | Path) -> None:
        """Writes an object, replacing any other; a large file is sent in parts."""
        try:
            obstore.put(self._store, self._key(name), payload)
        except _FAILURES as error:
            raise self._failure("write", name, error) from None

    def get(self, name: str) -> bytes | None:
        """The bytes of a small object; None if there is none."""
        try:
            return obstore.get(self._store, self._key(name)).bytes().to_bytes()
        except _FAILURES as error:
            if _is_missing(error):
                return None
            raise self._failure("read", name, error) from None

    def version(self, name: str = "") -> Version | None:
        """The version of an object; None if there is none."""
        try:
            return _version(obstore.head(self._store, self._key(name))) if self._key(name) else None
        except _FAILURES as error:
            if _is_missing(error):
                return None
            raise self._failure("look at", name, error) from None

    def list(self, below: str = "") -> dict[str, Version]:
        """All objects below a name, by their names."""
        prefix = self._key(below)
        start = len(self._prefix) + 1 if self._prefix else 0
        try:
            batches = obstore.list(self._store, f"{prefix}/" if prefix else None)
            found = ((one["path"][start:], _version(one)) for batch in batches for one in batch)
            return {name: version for name, version in found if name}  # "" marks a folder
        except _FAILURES as error:
            raise self._failure("list", below, error) from None

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects; missing ones count as removed."""
        if keys := [self._key(name) for name in names]:
            try:
                obstore.delete(self._store, keys)
            except _FAILURES as error:
                if not _is_missing(error):
                    raise self._failure("remove", "", error) from None

    def chunks(self, name: str, etag: str = "") -> Iterator[bytes]:
        """The bytes of one version of an object; a few ranges are fetched at a time."""
        key, version = self._key(name), {"if_match": etag} if etag else {}

        def chunk(start: int) -> bytes:
            options: Any = {**version, "range": (start, min(start + CHUNK, size))}
            return obstore.get(self._store, key, options=options).bytes().to_bytes()

        try:
            whole: Any = version
            first = obstore.get(self._store, key, options=whole)
            size, found = first.meta["size"], first.meta["e_tag"]
            if size <= CHUNK:
                yield first.bytes().to_bytes()
                return
            version = {"if_match": found} if found else {}
            step = CHUNK * CHUNKS_AT_ONCE
            with ThreadPoolExecutor(CHUNKS_AT_ONCE, "align-ranges") as pool:
                for begin in range(0, size, step):
                    yield from pool.map(chunk, range(begin, min(begin + step, size), CHUNK))
        except _FAILURES as error:
            raise self._failure("read", name, error) from None

    def fetch_all(
        self,
        targets: Mapping[str, Path],
        *,
        sha256: Mapping[str, str] | None = None,
        etags: Mapping[str, str] | None = None,
    ) -> None:
        """Copies objects to files, a few at a time, and makes their folders.

        An object with a wrong digest is fetched once more.
        """
        digests, versions = sha256 or {}, etags or {}

        def fetch(name: str) -> None:
            targets[name].parent.mkdir(parents=True, exist_ok=True)
            how = (name, targets[name], digests.get(name, ""), versions.get(name, ""))
            try:
                self._copy(*how)
            except CorruptionError as error:
                logger.warning("%s It is fetched again.", error)
                self._copy(*how)
            except PathError as error:
                if name not in digests:
                    raise
                raise CorruptionError(
                    f"{self.at(name)} is missing. Restore it from a copy, or make it again."
                ) from error

        with ThreadPoolExecutor(FILES_AT_ONCE, "align-fetch") as pool:
            for _ in pool.map(fetch, targets):
                pass  # raises the first error

    def _copy(self, name: str, target: Path, sha256: str, etag: str) -> None:
        arrived = hashlib.sha256()
        with fs.new_file(target, replaces=True) as sink:
            for chunk in self.chunks(name, etag):
                arrived.update(chunk)
                sink.write(chunk)
            if sha256 and arrived.hexdigest() != sha256:
                raise CorruptionError(
                    f"{self.at(name)} is damaged: its sha256 is not the recorded one. Restore it "
                    "from a copy, or make it again."
                )

    def at(self, name: str) -> str:
        """The location of an object."""
        return f"{self.url}/{name}".rstrip("/")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".strip("/")

    def _failure(self, verb: str, name: str, error: Exception) -> StorageError:
        """The error, without the store's text and traceback, which may show credentials."""
        if _NO_BUCKET.search(str(error)):
            return PathError(
                f"{self.url}: there is no bucket {self._bucket!r}. Make it, or name another."
            )
        if isinstance(error, FileNotFoundError):
            return PathError(f"{self.at(name)}: there is no such object. Check the location.")
        is_final = isinstance(error, _FINAL)
        advice = "the credentials and permissions for" if is_final else "the network, endpoint and"
        return StorageError(
            f"{self.at(name)}: {verb} failed: {_shown(error)}. Check {advice} the bucket, then run "
            "the same command again."
        )


def _shown(error: Exception) -> str:
    """The first line of a store's message, without the response body and secrets."""
    return redacted(str(error).partition("\n")[0].partition(": <")[0])[:400]


def _is_missing(error: Exception) -> bool:
    """Whether an object is missing; stores answer 404 for a missing bucket too."""
    return isinstance(error, FileNotFoundError) and not _NO_BUCKET.search(str(error))


def _version(meta: Any) -> Version:
    return Version(meta["size"], meta["e_tag"] or "")


@lru_cache(maxsize=64)
def open_bucket(scheme: str, name: str) -> ObjectStore:
    """The bucket with the credentials of the environment, of a profile, or of the machine."""
    for variable in ENDPOINTS:
        mask_secrets_of(os.environ.get(variable, ""))
    if scheme == "az" and not os.environ.get("AZURE_STORAGE_ACCOUNT_NAME"):
        raise UsageError(
            f"az://{name}: the storage account is not known. Set AZURE_STORAGE_ACCOUNT_NAME."
        )
    try:
        if scheme == "s3":
            return S3Store(name, **_s3_options())
        return GCSStore(name) if scheme == "gs" else AzureStore(name)
    except _FAILURES as error:
        raise UsageError(
            f"{scheme}://{name}: {_shown(error)}. Check the credentials in the environment."
        ) from None


def _s3_options() -> dict[str, Any]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    options: dict[str, Any] = {}
    if endpoint.startswith("http://"):  # explicit, for example a server on the local network
        options["config"] = {"aws_allow_http": "true"}
    shared = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials"
    has_profile = bool(os.environ.get("AWS_PROFILE")) or Path(shared).exists()
    if has_profile and not os.environ.get("AWS_ACCESS_KEY_ID"):
        options["credential_provider"] = _profile_keys()
    return options


def _profile_keys() -> Callable[[], S3Credential]:
    """The keys of AWS_PROFILE, or of the default one, as boto3 finds them."""
    try:
        import boto3  # noqa: PLC0415 - only profiles need it
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415
    except ImportError:
        raise UsageError(
            "AWS_PROFILE: profiles in ~/.aws need boto3. Install it, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY."
        ) from None

    class MaskedKeys(Boto3CredentialProvider):
        """Keys that no message shows."""

        def __call__(self) -> S3Credential:
            keys = super().__call__()
            for value in (keys["access_key_id"], keys["secret_access_key"], keys["token"] or ""):
                mask_secret(value)
            return keys

    try:
        return MaskedKeys(boto3.Session(region_name=os.environ.get("AWS_REGION")))
    except Exception as error:
        # The parser's message is left out: it may quote a line with a key.
        raise UsageError(
            f"AWS_PROFILE: ~/.aws has no keys for it ({type(error).__name__}). Correct it, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        ) from None
