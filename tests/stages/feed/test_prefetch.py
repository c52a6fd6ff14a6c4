"""How a stream ends: with its last step, with damage, or left alone; and what it holds at most."""

import threading
import tracemalloc
from contextlib import suppress

import pyarrow as pa
import pytest

from align.schemas.errors import AlignError, CorruptionError
from align.stages.feed.cache_index import unchecked
from align.stages.feed.epoch_order import ROW_GROUPS_PER_WINDOW, shuffled_order
from align.stages.storage.cache import Cache
from align.stages.storage.shards import read_shard
from support.refusals import refuses
from support.shard_cache import block_of, feed_of, opened, write_cache


def prefetching():
    return [thread for thread in threading.enumerate() if thread.name.startswith("align-prefetch")]


@pytest.fixture
def forty_units(tmp_path):
    blocks = [block_of(20, seed=seed) for seed in range(40)]
    return write_cache(tmp_path / "cache", blocks)


@pytest.mark.parametrize("check", [Cache.check, unchecked])
def test_damage_done_while_training_stops_it_and_names_the_unit(forty_units, check):
    source = opened(forty_units, check=check)
    folder, manifest = forty_units
    order = shuffled_order(source.train.group_offsets, seed=0, epoch=0)
    group = int(order.groups[-1])  # of the last window: it is not read ahead
    path = folder.data / manifest.shards[group].file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    with feed_of(source).steps(0) as steps:
        seen = [next(steps)]
        path.write_bytes(content)
        with refuses(CorruptionError, f"part-{group:08d}"):
            seen.extend(steps)
    assert 1 < len(seen) < feed_of(source).steps_per_epoch
    assert not prefetching()


def test_a_lost_shard_or_an_error_ends_the_stream(forty_units):
    source = opened(forty_units)
    with suppress(KeyError), feed_of(source).steps(0) as steps:
        next(steps)
        raise KeyError
    assert not prefetching()
    folder, manifest = forty_units
    for shard in manifest.shards:
        (folder.data / shard.file).unlink()
    with feed_of(source).steps(0) as steps, pytest.raises(AlignError):
        next(steps)
    assert not prefetching()


ROWS, TOKENS = 32, (150, 250)
GROUP = 4 * ROWS * 200 * (1 + 4)  # bytes of token ids in a row group: a prompt, four completions
WINDOW = GROUP * ROW_GROUPS_PER_WINDOW


def peak_of(folder, *, row_groups, epochs):
    """Bytes that numpy and Arrow hold at most while every row is streamed."""
    block = block_of(ROWS, tokens=TOKENS, token_logps=False)
    cache = write_cache(folder, [block] * row_groups)
    source = opened(cache, kind="paired", check=unchecked)
    read_shard(cache[0].data / cache[1].shards[0].file)  # what it imports is no part of a stream
    feed = feed_of(source, epochs=epochs, batch_size=16, tokens_per_batch=4096)
    arrow, before = [], pa.total_allocated_bytes()  # what tests before this one left
    tracemalloc.start()
    try:
        with feed.steps(0) as steps:
            for _ in steps:
                arrow.append(pa.total_allocated_bytes())
        return tracemalloc.get_traced_memory()[1] + max(arrow) - before
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_is_that_of_windows_whatever_is_streamed(tmp_path):
    peak = peak_of(tmp_path / "cache", row_groups=3 * ROW_GROUPS_PER_WINDOW, epochs=2)
    assert peak < 4 * WINDOW
