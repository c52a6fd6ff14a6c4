"""Shards: what is put in comes out, and what is damaged or elsewhere is never read."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.pipeline.precompute.verify import verify_files
from align.schemas.columns import Ragged
from align.schemas.errors import CorruptionError
from align.schemas.row_table import Rows
from align.stages.storage.shards import (
    ROWS_PER_GROUP,
    TOKENS_PER_GROUP,
    group_bounds,
    iter_row_groups,
    read_block,
    read_shard,
    write_shard,
)
from support.flips import flip_bits, flipped
from support.made_caches import block_of, in_child


def assert_same(left, right):
    """Every array equal bit by bit, so that -0.0 is not 0.0 and NaN is NaN."""
    assert _arrays(left) == _arrays(right)


def _arrays(rows):
    names = ("row", "file", "prompt_key", "split_key", "prompt_cut", "roles", "scores", "cut")
    plain = {name: getattr(rows, name) for name in (*names, "logps", "completion_offsets")}
    plain |= rows.carried
    for name in ("prompts", "completions", "learned", "token_logps"):
        if (lists := getattr(rows, name)) is not None:
            plain |= {f"{name}.values": lists.values, f"{name}.offsets": lists.offsets}
    found = {name: (str(value.dtype), value.tobytes()) for name, value in plain.items()}
    return found | {"ids": rows.ids()}


@pytest.mark.parametrize("rows", [0, 1, 7, 600])
@pytest.mark.parametrize("seed", range(3))
def test_a_shard_gives_back_what_was_put_in_as_the_same_bytes_each_time(tmp_path, rows, seed):
    block = block_of(
        rows, seed, token_logps=seed % 2 == 0, carried=("margin",)[: seed % 3], scores=seed % 2
    )
    for name in "ab":
        write_shard(tmp_path / name, block)
    assert_same(read_shard(tmp_path / "a"), block)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_missing_score_is_null_and_minus_zero_stays(tmp_path):
    block = block_of(20, 2)
    scores, logps = np.full(len(block.scores), np.nan), block.logps.copy()
    scores[0] = logps[0] = -0.0
    block = block.with_columns(score=scores, ref_logp=logps)
    write_shard(tmp_path / "a", block)
    found = pq.read_table(tmp_path / "a").column("score").to_pylist()
    assert {score for scores in found for score in scores} == {0.0, None}
    assert_same(read_shard(tmp_path / "a"), block)


def test_a_row_group_ends_at_512_rows_or_at_its_token_limit():
    assert group_bounds(block_of(2 * ROWS_PER_GROUP + 1, 0)) == [
        (0, 512),
        (512, 1024),
        (1024, 1025),
    ]
    half = TOKENS_PER_GROUP // 2
    lengths = [half, half, half, 3 * half, 1]  # the fourth row alone is over the limit
    prompts = Ragged.of([np.zeros(length, np.int32) for length in lengths], np.int32)
    completions = {"completion_ids": Ragged.of([[]], np.int32)}
    long = Rows.of({"prompt_ids": prompts}, completions, np.array([0, 0, 0, 1, 1, 1]))
    assert group_bounds(long) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_long_rows_and_chosen_columns_are_read_group_by_group(tmp_path):
    block = block_of(60, 4, max_tokens=60_000)
    write_shard(tmp_path / "a", block)
    tables = list(iter_row_groups(tmp_path / "a"))
    assert len(tables) == len(group_bounds(block)) > 1
    assert_same(read_block(pa.concat_tables(tables)), block)
    (first, *_) = iter_row_groups(tmp_path / "a", ["row_id"])
    assert first.column_names == ["row_id"]


@pytest.fixture
def shard(cache):
    return cache.data / cache.manifest().shards[1].file


def test_a_flipped_bit_anywhere_in_a_shard_is_noticed(cache, shard):
    assert verify_files(cache) == cache.manifest()
    commit = cache.manifest().shards[1]
    for _ in flip_bits(shard):
        with pytest.raises(CorruptionError, match="part-00000001"):
            cache.check(commit)
    cache.check(commit)


def test_a_flipped_bit_in_a_page_never_gives_a_wrong_value(tmp_path):
    """With the digest out of the way: the page checksums alone, in a child that may crash."""
    path = tmp_path / "shard"
    write_shard(path, block_of(300, 1, token_logps=True))
    good, table = path.read_bytes(), pq.read_table(path)
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")

    def flip():
        for damaged in flipped(good[4:footer], 500):
            path.write_bytes(good[:4] + damaged + good[footer:])
            try:
                read_shard(path)
                found = list(iter_row_groups(path))
            except CorruptionError:
                continue
            assert found[0].equals(table)

    assert in_child(flip) == 0


def damaged_in(cache):
    """The numbers of damaged shards."""
    numbers = []
    for entry in cache.manifest().shards:
        try:
            cache.check(entry)
        except CorruptionError as error:
            assert entry.file in str(error)  # noqa: PT017
            numbers.append(entry.number)
    return numbers


def test_swapped_and_missing_shards_are_noticed_and_extra_ones_ignored(cache, shard):
    (cache.data / "notes.txt").write_text("mine")
    shutil.copy(shard, cache.data / f"part-00000077-{'0' * 16}.parquet")
    verify_files(cache)
    other = cache.data / cache.manifest().shards[0].file
    held = shard.read_bytes()
    shard.write_bytes(other.read_bytes())
    other.write_bytes(held)
    assert damaged_in(cache) == [0, 1]
    shard.unlink()
    assert damaged_in(cache) == [0, 1]
