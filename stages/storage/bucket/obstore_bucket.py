"""Buckets of S3, Google Cloud Storage and Azure, by obstore, with credentials of the usual chain.

Credentials are never kept or shown. Variables of the environment come first, then the profile in
`~/.aws`, then what the machine is given: a web identity, a container's role, or its instance
metadata. The store asks for these itself when it first needs them.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from ....schemas.errors import UsageError
from ....schemas.safe_text import mask_secret, mask_secrets_of
from .buckets import NoBucketError, Seen, Version

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import S3Credential

    ObjectStore: TypeAlias = AzureStore | GCSStore | S3Store

ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
READ_AGAIN = timedelta(minutes=5)  # a tool may have renewed the keys of a profile


@dataclass(frozen=True)
class ObstoreBucket:
    """A bucket as obstore speaks to it."""

    store: ObjectStore

    failures: ClassVar = (exceptions.BaseError, OSError, ValueError)
    final: ClassVar = (
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
        exceptions.NotSupportedError,
        exceptions.InvalidPathError,
        exceptions.UnknownConfigurationKeyError,
        PermissionError,
    )

    def head(self, key: str) -> Version:
        """The version of an object."""
        with _bucket_told_from_object():
            return _version(obstore.head(self.store, key))

    def get(self, key: str) -> Seen:
        """A small object."""
        with _bucket_told_from_object():
            found = obstore.get(self.store, key)
            return Seen(found.bytes().to_bytes(), _version(found.meta))

    def get_range(self, key: str, start: int, end: int, version: Version) -> bytes:
        """Some bytes of an object that still has this version."""
        part: Any = {"range": (start, end), "if_match": version.e_tag or None}
        return obstore.get(self.store, key, options=part).bytes().to_bytes()

    def put(self, key: str, payload: bytes | Path) -> None:
        """Writes an object, in place of any other."""
        obstore.put(self.store, key, payload)

    def put_if(self, key: str, payload: bytes, *, known: Version | None) -> None:
        """Writes an object that is absent, or still has the version."""
        mode: PutMode = "create"
        if known:
            mode = {"e_tag": known.e_tag, **({"version": known.version} if known.version else {})}
        with _bucket_told_from_object():
            obstore.put(self.store, key, payload, mode=mode, use_multipart=False)

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; some stores say so if there is none."""
        with _bucket_told_from_object():
            obstore.delete(self.store, keys)

    def below(self, prefix: str) -> Iterator[tuple[str, Version]]:
        """All objects whose keys begin so."""
        for batch in obstore.list(self.store, prefix or None):
            yield from ((entry["path"], _version(entry)) for entry in batch)

    def right_below(self, key: str) -> list[str]:
        """The keys right below a key."""
        found = obstore.list_with_delimiter(self.store, key or None)
        return [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]


def _version(meta: Any) -> Version:
    return Version(meta["size"], meta["e_tag"] or "", meta["version"] or "")


@contextmanager
def _bucket_told_from_object() -> Iterator[None]:
    """Tells a missing bucket from a missing object: stores answer both with 404."""
    try:
        yield
    except FileNotFoundError as error:
        if re.search("NoSuchBucket|ContainerNotFound", str(error)):
            raise NoBucketError from None
        raise


class S3Bucket(ObstoreBucket):
    """The bucket of `s3://name`, of Amazon or of whoever speaks as S3 does."""

    @classmethod
    def open(cls, name: str) -> Self:
        """With the endpoint, the region and the keys of the environment, or of a profile."""
        _mask_endpoints()
        return cls(S3Store(name, **_s3_settings()))


class GoogleBucket(ObstoreBucket):
    """The bucket of `gs://name`."""

    @classmethod
    def open(cls, name: str) -> Self:
        """With the credentials of the environment."""
        _mask_endpoints()
        return cls(GCSStore(name))


class AzureBucket(ObstoreBucket):
    """The container of `az://name`."""

    @classmethod
    def open(cls, name: str) -> Self:
        """In the storage account of the environment, without which there is none."""
        _mask_endpoints()
        if not os.environ.get("AZURE_STORAGE_ACCOUNT_NAME"):
            raise UsageError(
                f"az://{name}: the storage account is not known. Set AZURE_STORAGE_ACCOUNT_NAME."
            )
        return cls(AzureStore(name))


def _mask_endpoints() -> None:
    for name in ENDPOINTS:
        mask_secrets_of(os.environ.get(name, ""))


def _s3_settings() -> dict[str, Any]:
    config: dict[str, str] = {}
    if _endpoint().startswith("http://"):  # written out by the user, as for a server beside them
        config["aws_allow_http"] = "true"
    profile = _profile()
    if not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys() and "region" in profile:
        config["aws_region"] = profile["region"]
    if os.environ.get("AWS_ACCESS_KEY_ID") or "aws_access_key_id" not in profile:
        return {"config": config}
    return {"config": config, "credential_provider": _keys_of_profile}


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""


def _keys_of_profile() -> S3Credential:
    """The keys of the profile, read again every few minutes."""
    profile = _profile()
    secret, token = profile["aws_secret_access_key"], profile.get("aws_session_token")
    for value in (profile["aws_access_key_id"], secret, token or ""):
        mask_secret(value)
    return {
        "access_key_id": profile["aws_access_key_id"],
        "secret_access_key": secret,
        "token": token,
        "expires_at": datetime.now(UTC) + READ_AGAIN,
    }


def _profile() -> dict[str, str]:
    """The entries of the chosen profile in both files of `~/.aws`; empty without such files."""
    name = os.environ.get("AWS_PROFILE") or "default"
    home = Path.home() / ".aws"
    keys = _section(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials", name)
    section = name if name == "default" else f"profile {name}"
    return {**_section(os.environ.get("AWS_CONFIG_FILE") or home / "config", section), **keys}


def _section(path: str | Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeError, OSError) as error:
        # Without its text: the parser's message quotes the line, which may be a key.
        raise UsageError(
            f"{path}: not readable as a file of AWS profiles ({type(error).__name__}). Correct it, "
            "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        ) from None
    return dict(parser[name]) if parser.has_section(name) else {}
