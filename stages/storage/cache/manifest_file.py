"""A name that has moved to `cache`."""

from ....schemas.cache import Manifest
from .cache import Cache


def load_manifest(cache: Cache) -> Manifest:
    """The manifest of a finished cache."""
    return cache.manifest()
