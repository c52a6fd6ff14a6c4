"""How a stream ends: with the last step, with damage, or because nobody wants more of it."""

import threading
from contextlib import suppress

import pytest

from align.schemas.batches import Cursor
from align.schemas.errors import AlignError, CorruptionError
from align.stages.feed.cache_index import unchecked
from align.stages.feed.epoch_order import shuffled_order
from align.stages.storage.verify_cache import check_shard
from support.shard_cache import block_of, feed_of, opened, write_cache

START = Cursor(0, 0)


@pytest.fixture
def forty_units(tmp_path):
    blocks = [block_of(20, seed=seed) for seed in range(40)]
    return write_cache(tmp_path / "cache", blocks)


@pytest.mark.parametrize("check", [check_shard, unchecked])
def test_damage_done_while_training_stops_it_and_names_the_unit(forty_units, check):
    source = opened(forty_units, check=check)
    folder, manifest = forty_units
    group = int(training_groups(source)[-1])  # of the last window: it is not read ahead
    path = folder.data / manifest.shards[group].file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    with feed_of(source).steps(START) as steps:
        seen = [next(steps)]
        path.write_bytes(content)
        with pytest.raises(CorruptionError, match=f"unit {group}"):
            seen.extend(steps)
    assert 1 < len(seen) < feed_of(source).steps_per_epoch
    assert not prefetching()


def training_groups(source):
    """Row groups in the order they are read."""
    sizes = source.index.train.group_offsets
    return shuffled_order(sizes, seed=0, epoch=0).groups


def test_a_shard_that_is_gone_stops_training(forty_units):
    source = opened(forty_units)
    folder, manifest = forty_units
    for shard in manifest.shards:
        (folder.data / shard.file).unlink()
    with feed_of(source).steps(START) as steps, pytest.raises(AlignError):
        next(steps)


def prefetching():
    return [thread for thread in threading.enumerate() if thread.name == "align-prefetch"]


@pytest.mark.parametrize("taken", [0, 1, 30])
def test_a_stream_that_is_left_early_leaves_no_thread(forty_units, taken):
    with feed_of(opened(forty_units), epochs=99).steps(START) as steps:
        for _ in range(taken):
            next(steps)
        assert prefetching()
    assert not prefetching()


def test_an_error_of_the_consumer_leaves_no_thread(forty_units):
    with suppress(KeyError), feed_of(opened(forty_units)).steps(START) as steps:
        next(steps)
        raise KeyError
    assert not prefetching()
