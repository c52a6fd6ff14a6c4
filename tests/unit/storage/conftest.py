"""A small cache for each test, and a disk that need not be waited for."""

import os

import pytest

from align.stages.storage.cache_work import CacheWork
from support.made_caches import make_cache, plan_of


@pytest.fixture(autouse=True, scope="session")
def quick_fsync():
    """No program can see what fsync does; that it is called is what the log of operations tells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def cache(tmp_path):
    """A finished cache of three shards."""
    make_cache(tmp_path / "cache")
    return CacheWork(tmp_path / "cache", plan_of((1, 2, 3)).plan_key)
