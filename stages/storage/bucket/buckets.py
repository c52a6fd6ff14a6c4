"""The Protocol of a store of objects, and its kinds by the schemes of locations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol, Self, cast

# Each by its file here and its class, which is a Bucket.
SCHEMES: Mapping[str, tuple[str, str]] = {
    "s3": ("obstore_bucket", "S3Bucket"),
    "gs": ("obstore_bucket", "GoogleBucket"),
    "az": ("obstore_bucket", "AzureBucket"),
}


class NoBucketError(FileNotFoundError):
    """There is no such bucket, and so no such object."""


@dataclass(frozen=True)
class Version:
    """An object as it was when it was looked at."""

    size: int
    e_tag: str
    version: str = ""


@dataclass(frozen=True)
class Seen:
    """An object's bytes, and the version they are of."""

    content: bytes
    version: Version


class Bucket(Protocol):
    """Whole objects by their keys. A write is durable, and seen by everybody, when it returns.

    FileNotFoundError says that there is no such object.
    """

    failures: ClassVar[tuple[type[Exception], ...]]  # all that its calls raise
    final: ClassVar[tuple[type[Exception], ...]]  # of those, what another try cannot change

    @classmethod
    def open(cls, name: str) -> Self:
        """The bucket of this name; need not ask it anything yet."""
        ...

    def head(self, key: str) -> Version:
        """The version of an object."""
        ...

    def get(self, key: str) -> Seen:
        """A small object."""
        ...

    def get_range(self, key: str, start: int, end: int, version: Version) -> bytes:
        """Some bytes of an object that still has this version; anything else is a failure."""
        ...

    def put(self, key: str, payload: bytes | Path) -> None:
        """Writes an object, in place of any other."""
        ...

    def put_if(self, key: str, payload: bytes, *, known: Version | None) -> None:
        """Writes an object that is absent, or still has the version; anything else is a failure.

        Of several at the same time one succeeds.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects."""
        ...

    def below(self, prefix: str) -> Iterator[tuple[str, Version]]:
        """All objects whose keys begin so, by their whole keys."""
        ...

    def right_below(self, key: str) -> list[str]:
        """The keys right below a key, whole, of objects and of what holds further ones."""
        ...


@lru_cache(maxsize=64)
def open_bucket(scheme: str, name: str) -> Bucket:
    """The bucket of a location; one for the process."""
    return kind_of(scheme).open(name)


def kind_of(scheme: str) -> type[Bucket]:
    """The class of the buckets of a scheme; imports its library."""
    file, kind = SCHEMES[scheme]
    return cast("type[Bucket]", getattr(import_module(f".{file}", __package__), kind))
