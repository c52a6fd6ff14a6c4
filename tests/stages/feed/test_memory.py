"""What a stream holds in memory at most."""

import tracemalloc

import pyarrow as pa
import pytest

from align.schemas.batches import Cursor
from align.stages.feed.cache_index import unchecked
from align.stages.feed.epoch_order import ROW_GROUPS_PER_WINDOW
from align.stages.feed.loader import CacheFeed
from align.stages.storage.shards import read_shard
from support.shard_cache import block_of, opened, settings_of, write_cache

ROWS, TOKENS = 32, (150, 250)
GROUP = 4 * ROWS * 200 * (1 + 4)  # bytes of token ids in a row group: a prompt, four completions
WINDOW = GROUP * ROW_GROUPS_PER_WINDOW


def peak_of(folder, *, row_groups, epochs):
    """Bytes that numpy and Arrow hold at most while every row is streamed."""
    block = block_of(ROWS, tokens=TOKENS, token_logps=False)
    cache = write_cache(folder, [block] * row_groups)
    source = opened(cache, kind="paired", check=unchecked)
    read_shard(cache[0].data / cache[1].shards[0].file)  # what it imports is no part of a stream
    settings = settings_of(epochs=epochs, batch_size=16, tokens_per_batch=4096)
    arrow = []
    tracemalloc.start()
    try:
        with CacheFeed(source, source, settings).steps(Cursor(0, 0)) as steps:
            for _ in steps:
                arrow.append(pa.total_allocated_bytes())
        return tracemalloc.get_traced_memory()[1] + max(arrow)
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("windows", "epochs"), [(9, 1), (3, 3)])
def test_memory_is_that_of_windows_whatever_is_streamed(tmp_path, windows, epochs):
    row_groups = windows * ROW_GROUPS_PER_WINDOW
    peak = peak_of(tmp_path / "cache", row_groups=row_groups, epochs=epochs)
    assert peak < 4 * WINDOW
