"""Names that have moved to `cache`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from ....schemas.cache import Manifest, Shard
from ....schemas.file_version import Remember, digest_anew
from ....schemas.row_table import Rows
from .cache import Cache


def naming_unit(_: int) -> AbstractContextManager[None]:
    """Nothing: the name of a shard's file has its number."""
    return nullcontext()


def check_shard(cache: Cache, shard: Shard, remember: Remember = digest_anew) -> None:
    """CorruptionError when the shard is not, byte for byte, what was committed."""
    cache.check(shard, remember)


check_before_reading = check_shard


def sample_rows(cache: Cache, manifest: Manifest, count: int) -> Iterator[tuple[str, Rows]]:
    """Rows that are spread over the cache."""
    return cache.sample_rows(manifest, count)
