"""Buckets of S3, Google Cloud Storage and Azure, by obstore."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import obstore
from obstore import exceptions

from ..remote import ObjectStore, open_bucket
from .buckets import NoBucketError, Seen, Version

if TYPE_CHECKING:
    from obstore import PutMode


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
        """With the credentials of the environment, of a profile, or of the machine."""
        return cls(open_bucket("s3", name))


class GoogleBucket(ObstoreBucket):
    """The bucket of `gs://name`."""

    @classmethod
    def open(cls, name: str) -> Self:
        """With the credentials of the environment."""
        return cls(open_bucket("gs", name))


class AzureBucket(ObstoreBucket):
    """The container of `az://name`."""

    @classmethod
    def open(cls, name: str) -> Self:
        """In the storage account of the environment."""
        return cls(open_bucket("az", name))
