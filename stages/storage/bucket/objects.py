"""Objects of a store as paths (`s3://bucket/key`, `gs://…`, `az://…`), and what is done to them.

An object is written whole. What must be written once is written on the condition that it is
absent, or unchanged since it was read; nothing is ever renamed or copied, because parts of an
upload and copies take no condition. An answer may be lost after the store has done its work, so a
conditional write that fails is read back: these bytes mean that it, or its like, succeeded.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from ....schemas.errors import LockedError, PathError, StorageError, UsageError
from ....schemas.safe_text import mask_secrets_of, redacted
from .buckets import SCHEMES, Bucket, NoBucketError, Seen, Version, kind_of, open_bucket

PAUSES = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0)  # seconds before each try of a conditional write
CHUNK = 16 << 20
CHUNKS_AHEAD = 4
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", re.ASCII)


@dataclass(frozen=True, order=True)
class ObjectPath:
    """An object, or all objects whose keys begin with this one and a slash."""

    scheme: str
    bucket: str
    key: str
    sha256: str = ""  # of the bytes it has to hold, where they are known
    bytes: int = -1  # their number

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, f"{self.key}/{name}".lstrip("/"))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        """The last part of its key."""
        return PurePosixPath(self.key).name or self.bucket

    @property
    def parent(self) -> ObjectPath:
        """The key one level up."""
        return ObjectPath(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def pinned(self, sha256: str, size: int) -> ObjectPath:
        """The same path, with the bytes that it has to hold."""
        return replace(self, sha256=sha256, bytes=size)

    def resolve(self) -> ObjectPath:
        """Itself: it is absolute."""
        return self

    def exists(self) -> bool:
        """Whether there is an object of this key, or one below it."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether there is an object of this key."""
        return bool(self.key) and version_of(self) is not None

    def is_dir(self) -> bool:
        """Whether there is an object below this key."""
        return next(iter(_listed(self)), None) is not None

    def iterdir(self) -> Iterator[ObjectPath]:
        """The keys right below this one, sorted."""
        with _reported("list", self):
            keys = self.home.right_below(self.key)
        yield from sorted(ObjectPath(self.scheme, self.bucket, key) for key in keys)

    @property
    def kind(self) -> type[Bucket]:
        """The class of the bucket it is in."""
        return kind_of(self.scheme)

    @property
    def home(self) -> Bucket:
        """The bucket it is in."""
        return open_bucket(self.scheme, self.bucket)


Location: TypeAlias = Path | ObjectPath


def location(text: str | Location) -> Location:
    """A path, or an object of a store where the text begins with a scheme of one."""
    return object_at(str(text)) or Path(str(text))


def object_at(text: str) -> ObjectPath | None:
    """The object that a text names; None if it is a path."""
    found = _URI.fullmatch(text)
    if found is None:
        return None
    mask_secrets_of(text)
    scheme, rest = found[1].lower(), found[2]
    bucket, _, key = rest.partition("/")
    if scheme not in SCHEMES:
        raise UsageError(
            f"{text}: {scheme}:// is not supported. Give a path, or "
            f"{', '.join(f'{one}://' for one in SCHEMES)}."
        )
    if set(rest) & set("@?#"):
        raise UsageError(
            f"{text}: a location is a bucket and a key and nothing else. Give credentials by the "
            "environment or ~/.aws, the server by AWS_ENDPOINT_URL."
        )
    parts = [part for part in key.split("/") if part]
    if not _BUCKET.fullmatch(bucket) or {".", ".."} & {*parts} or not rest.isprintable():
        raise UsageError(f"{text}: not a bucket and a key. Write {scheme}://BUCKET/KEY.")
    return ObjectPath(scheme, bucket, "/".join(parts))


def is_remote(text: str | Path) -> bool:
    """Whether a text names an object, and not a path."""
    return isinstance(text, str) and _URI.fullmatch(text) is not None


def require_on_disk(text: str, what_is: str) -> Path:
    """The path of an output; refuses an object."""
    if is_remote(text):
        raise UsageError(f"{text}: {what_is} written to a disk. Choose an --output there.")
    return Path(text)


def version_of(path: ObjectPath) -> Version | None:
    """An object's size and version; None if there is no such object."""
    with _reported("look at", path):
        try:
            return path.home.head(path.key)
        except FileNotFoundError as error:
            _require_bucket(path, error)
            return None


def read(path: ObjectPath) -> bytes:
    """The bytes of an object; StorageError if there is none."""
    found = look(path)
    if found is None:
        raise _missing(path)
    return found.content


def _missing(path: ObjectPath) -> PathError:
    return PathError(f"{path}: there is no such object. See that the location is right.")


def look(path: ObjectPath) -> Seen | None:
    """The bytes of a small object; None if there is no such object."""
    with _reported("read", path):
        try:
            return path.home.get(path.key)
        except FileNotFoundError as error:
            _require_bucket(path, error)
            return None


def read_chunks(path: ObjectPath, version: Version) -> Iterator[bytes]:
    """The bytes of one version of an object in order, some chunks read ahead of the reader."""
    starts = iter(range(0, version.size, CHUNK))
    with ThreadPoolExecutor(CHUNKS_AHEAD, "align-objects") as pool:
        waiting: deque[Future[bytes]] = deque()
        for start in starts:
            end = min(start + CHUNK, version.size)
            waiting.append(pool.submit(_read_range, path, version, start, end))
            if len(waiting) >= CHUNKS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _read_range(path: ObjectPath, version: Version, start: int, end: int) -> bytes:
    with _reported("read", path):
        return path.home.get_range(path.key, start, end, version)


def put(path: ObjectPath, payload: bytes | Path) -> None:
    """Writes an object, in place of any other of this key."""
    with _reported("write", path):
        path.home.put(path.key, payload)


def put_new(path: ObjectPath, payload: bytes) -> bool:
    """Writes an object unless there is one; returns whether the object has these bytes."""
    return _try_to_put(path, payload, expected=None) is None


def put_over(path: ObjectPath, payload: bytes, *, expected: bytes | None) -> None:
    """Replaces an object that has the expected bytes, or is absent where None are."""
    if _try_to_put(path, payload, expected=expected) is not None:
        raise LockedError(
            f"{path} was changed by another process while this one worked on it. Run the same "
            "command again: what is finished is kept."
        )


def _try_to_put(path: ObjectPath, payload: bytes, *, expected: bytes | None) -> bytes | None:
    """None once the object has these bytes; else the bytes it has, which are not the expected."""
    refusal: Exception | None = None
    known: Version | None = None
    for number, pause in enumerate(PAUSES):
        time.sleep(pause)
        if number or expected is not None:
            # Also after a failure: the store may have done its work, and only its answer was lost.
            seen = look(path)
            content = seen.content if seen else None
            if content == payload:
                return None
            if content != expected:
                return content or b""
            known = seen.version if seen else None
        try:
            path.home.put_if(path.key, payload, known=known)
        except path.kind.final as error:
            raise _refused("write", path, error) from None
        except path.kind.failures as error:
            _require_bucket(path, error)
            refusal = error
        else:
            return None
    assert refusal is not None
    raise _refused("write", path, refusal) from None


def remove(path: ObjectPath) -> None:
    """Removes an object, if there is one."""
    _remove([path])


def remove_below(path: ObjectPath) -> None:
    """Removes all objects below a key."""
    _remove([ObjectPath(path.scheme, path.bucket, key) for key in below(path)])


def _remove(paths: list[ObjectPath]) -> None:
    if paths:
        with _reported("remove", paths[0]):
            try:
                paths[0].home.delete([path.key for path in paths])
            except FileNotFoundError as error:  # some stores say so, and it is what was wanted
                _require_bucket(paths[0], error)


def below(path: ObjectPath) -> dict[str, Version]:
    """All objects below a key, by their whole keys."""
    return dict(_listed(path))


def _listed(path: ObjectPath) -> Iterator[tuple[str, Version]]:
    with _reported("list", path):
        yield from path.home.below(f"{path.key}/" if path.key else "")


@contextmanager
def _reported(name: str, path: ObjectPath) -> Iterator[None]:
    """Raises a failure of the store as a StorageError without anything secret in it."""
    try:
        yield
    except FileNotFoundError:
        raise PathError(
            f"{path}: {name} failed: there is no such object or bucket. See that the location is "
            "right."
        ) from None
    except path.kind.failures as error:
        raise _refused(name, path, error) from None


def _refused(name: str, path: ObjectPath, error: Exception) -> StorageError:
    """The error without the store's own: its text may hold keys, and so would a traceback."""
    said = redacted(str(error).partition("\n")[0].partition(": <")[0])[:400]
    if isinstance(error, path.kind.final):
        way = "Check the credentials and their rights to the bucket"
    else:
        way = "Check the network, the endpoint and the bucket"
    return StorageError(f"{path}: {name} failed: {said}. {way}, then run the same command again.")


def _require_bucket(path: ObjectPath, error: Exception) -> None:
    if isinstance(error, NoBucketError):
        raise PathError(
            f"{path}: there is no bucket {path.bucket!r}. Make it, or name another."
        ) from None
