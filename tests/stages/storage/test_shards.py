"""Shards: what is put in comes out, and what is damaged or elsewhere is never read."""

import dataclasses
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.columns import Ragged
from align.schemas.errors import CorruptionError
from align.stages.storage.cache.manifest_file import load_manifest, write_manifest
from align.stages.storage.cache.shards import (
    ROWS_PER_GROUP,
    TOKENS_PER_GROUP,
    group_bounds,
    iter_row_groups,
    read_block,
    read_columns,
    read_shard,
    to_table,
    write_shard,
)
from align.stages.storage.cache.verify_cache import check_shard, damaged_units, verify_cache
from support.flips import flipped
from support.made_caches import block_of, in_child


def assert_same(left, right):
    """Every array equal bit by bit, so that -0.0 is not 0.0 and NaN is NaN."""
    assert _arrays(left) == _arrays(right)


def _arrays(block):
    rows = block.rows
    ragged = {"prompts": rows.prompts, "completions": rows.completions}
    if block.token_logps is not None:
        ragged["token_logps"] = block.token_logps
    plain = {name: value for name, value in vars(rows).items() if isinstance(value, np.ndarray)} | {
        "logps": block.logps,
        **rows.carried,
    }
    for name, lists in ragged.items():
        plain |= {f"{name}.values": lists.values, f"{name}.offsets": lists.offsets}
    return {name: (str(value.dtype), value.tobytes()) for name, value in plain.items()}


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


def test_any_slice_of_a_table_is_the_block_of_its_rows():
    table = to_table(block_of(40, 3, token_logps=True, carried=("margin",), scores=0.5))
    draw = np.random.default_rng(0)
    for _ in range(60):
        start, stop = sorted(draw.integers(0, 41, 2))
        part = table.slice(start, stop - start)
        copied = pa.Table.from_pylist(part.to_pylist(), schema=table.schema)  # has no offsets
        assert_same(read_block(part), read_block(copied))
    chunks = pa.concat_tables([table.slice(0, 11), table.slice(11, 0), table.slice(11)])
    assert_same(read_block(chunks), read_block(table))


def test_the_row_id_of_a_copy_differs_from_the_first():
    rows = dataclasses.replace(
        block_of(3, 0).rows,
        row_id=np.array([b"\x00" * 16, b"\xff" * 16, b"a" + b"\x00" * 15], dtype="S16"),
        copy=np.array([0, 1, 12], dtype=np.int32),
    )
    assert rows.ids() == ("00" * 16, "ff" * 16 + "-1", "61" + "00" * 15 + "-12")


def test_a_missing_score_is_null_and_minus_zero_stays(tmp_path):
    block = block_of(20, 2)
    block.rows.scores[:] = np.nan
    block.rows.scores[0] = block.logps[0] = -0.0
    write_shard(tmp_path / "a", block)
    found = pq.read_table(tmp_path / "a").column("score").to_pylist()
    assert {score for scores in found for score in scores} == {0.0, None}
    assert_same(read_shard(tmp_path / "a"), block)


def test_a_row_group_ends_at_512_rows_or_at_its_token_limit():
    assert group_bounds(block_of(2 * ROWS_PER_GROUP + 1, 0).rows) == [
        (0, 512),
        (512, 1024),
        (1024, 1025),
    ]
    rows = block_of(5, 0).rows
    half = TOKENS_PER_GROUP // 2
    lengths = [half, half, half, 3 * half, 1]  # the fourth row alone is over the limit
    long = dataclasses.replace(
        rows,
        prompts=Ragged.of([np.zeros(length, np.int32) for length in lengths], np.int32),
        completions=Ragged.of([[]], np.int32),
        branch_offsets=np.array([0, 0, 0, 1, 1, 1]),
    )
    assert group_bounds(long) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_long_rows_and_chosen_columns_are_read_group_by_group(tmp_path):
    block = block_of(60, 4, max_tokens=60_000)
    write_shard(tmp_path / "a", block)
    tables = list(iter_row_groups(tmp_path / "a"))
    assert len(tables) == len(group_bounds(block.rows)) > 1
    assert_same(read_block(pa.concat_tables(tables)), block)
    (first, *_) = iter_row_groups(tmp_path / "a", ["row_id"])
    assert first.column_names == ["row_id"]


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("row_id", "0" * 31, "row id"),
        ("row_id", "0" * 32 + "-0", "row id"),
        ("num_tokens", [99], "tokens"),
        ("prompt_tokens", 99, "prompt_tokens"),
        ("role", [0, 0], "lengths"),
    ],
)
def test_columns_that_contradict_each_other_are_corrupt(column, value, said):
    table = to_table(block_of(1, 6))
    index = table.column_names.index(column)
    bad = table.set_column(index, table.field(index), pa.array([value], table.field(index).type))
    with pytest.raises(CorruptionError, match=said):
        read_block(bad, source="part")


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("prompts", -1, "1 token ids in prompt_ids that cannot be, the first -1"),
        ("completions", -(2**31), "in completion_ids that cannot be, the first -2147483648"),
        ("logps", np.nan, "log-probs that are not finite"),
        ("logps", -np.inf, "log-probs that are not finite"),
        ("token_logps", np.inf, "log-probs that are not finite"),
        ("roles", 6, "roles other than 0 to 5"),
        ("roles", -1, "roles other than 0 to 5"),
    ],
)
def test_values_that_nothing_can_have_made_are_refused(column, value, said):
    block = block_of(9, 2, token_logps=True)
    of_rows = getattr(block.rows, column, None)
    values = getattr(block, column) if of_rows is None else of_rows
    (values.values if isinstance(values, Ragged) else values)[-1] = value
    with pytest.raises(CorruptionError, match=f"part has .*{said}"):
        read_block(to_table(block), source="part")


def test_a_token_that_the_model_does_not_know_is_refused():
    block = block_of(9, 2)
    block.rows.prompts.values[:], block.rows.completions.values[:] = 7, 8
    assert len(read_block(to_table(block), vocabulary=9).rows) == 9
    said = "in completion_ids that cannot be, the first 8, and the model knows those to 7"
    with pytest.raises(CorruptionError, match=said):
        read_block(to_table(block), vocabulary=8)


def test_what_is_not_learned_may_have_any_log_prob():
    block = block_of(9, 2, token_logps=True)
    lists = block.rows.completions
    turns = np.ones(len(lists.values), np.int16)
    turns[0], block.token_logps.values[0] = -1, -np.inf
    rows = dataclasses.replace(block.rows, turns=Ragged(turns, lists.offsets))
    assert len(read_block(to_table(dataclasses.replace(block, rows=rows))).rows) == 9


def test_what_is_not_a_shard_is_corrupt(tmp_path):
    table = to_table(block_of(1, 6))
    with pytest.raises(CorruptionError, match="other columns"):
        read_block(table.drop_columns(["cut"]))
    (tmp_path / "part").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(CorruptionError, match=r"part is damaged"):
        read_shard(tmp_path / "part")


def test_whatever_bit_flips_in_the_end_of_a_shard_no_other_error_comes_of_it(tmp_path):
    path, names = tmp_path / "part", ["num_tokens", "margin", "score"]
    write_shard(path, block_of(20, 2, carried=("margin",)))
    good, refused = path.read_bytes(), []
    for place in range(len(good) - 8 - pq.ParquetFile(path).metadata.serialized_size, len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        path.write_bytes(bad)
        try:
            table, _ = read_columns(path, names)
        except CorruptionError as error:
            refused.append(str(error))
        else:
            assert table.column_names == names
    assert "has other columns than a shard" in " ".join(refused)
    assert len(refused) > 500


@pytest.fixture
def shard(cache):
    return cache.data / load_manifest(cache).shards[1].file


def test_a_flipped_bit_anywhere_in_a_shard_is_noticed(cache, shard):
    assert verify_cache(cache) == load_manifest(cache)
    commit, good = load_manifest(cache).shards[1], shard.read_bytes()
    for damaged in flipped(good, 600):
        shard.write_bytes(damaged)
        with pytest.raises(CorruptionError, match="unit 1"):
            check_shard(cache, commit)
    shard.write_bytes(good)
    check_shard(cache, commit)


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


DAMAGE = {
    "cut": lambda good: good[: len(good) // 3],
    "longer": lambda good: good + b"\0",
    "in another order": lambda good: good[64:128] + good[:64] + good[128:],
}


def test_other_damage_is_noticed_and_its_unit_named(cache, shard):
    good = shard.read_bytes()
    for name, damage in DAMAGE.items():
        shard.write_bytes(damage(good))
        assert list(damaged_units(cache, load_manifest(cache))) == [1], name
    for place in (0, 3):  # preparation's, and that of a unit
        (cache.root / load_manifest(cache).quarantine[place].file).write_bytes(b"")
    with pytest.raises(CorruptionError, match=r"3 of 7 files are damaged(.|\n)*unit 1") as said:
        verify_cache(cache)
    assert str(said.value).count("quarantine:") == 2


def test_swapped_and_missing_shards_are_noticed_and_extra_ones_ignored(cache, shard):
    (cache.data / "notes.txt").write_text("mine")
    shutil.copy(shard, cache.data / f"part-00000077-{'0' * 16}.parquet")
    verify_cache(cache)
    other = cache.data / load_manifest(cache).shards[0].file
    held = shard.read_bytes()
    shard.write_bytes(other.read_bytes())
    other.write_bytes(held)
    assert list(damaged_units(cache, load_manifest(cache))) == [0, 1]
    shard.unlink()
    assert list(damaged_units(cache, load_manifest(cache))) == [0, 1]


NOT_FILES = {
    "a link": lambda path, outside: path.symlink_to(outside / path.name),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a folder": lambda path, _: path.mkdir(),
    "a link to a folder": lambda path, outside: path.symlink_to(outside),
    "in a folder that is a link": lambda path, outside: [
        path.parent.rmdir(),
        path.parent.symlink_to(outside),
    ],
}


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_not_a_file_is_never_read(cache, shard, tmp_path, kind):
    """A link to the very same bytes is refused like any other."""
    cache.data.rename(tmp_path / "outside")
    cache.data.mkdir()
    NOT_FILES[kind](shard, tmp_path / "outside")
    with pytest.raises(CorruptionError, match=r"unit 1.*cannot be opened"):
        check_shard(cache, load_manifest(cache).shards[1])


def test_a_name_that_leads_elsewhere_is_refused(cache):
    commit = load_manifest(cache).shards[1]
    for name in ("../manifest.json", "a/../b", "", "..", commit.file + "\n", commit.file + "\0"):
        with pytest.raises(CorruptionError, match="not the name of a shard"):
            check_shard(cache, dataclasses.replace(commit, file=name))


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 9), ("branches", 1), ("tokens", 1), ("logp_sum", 0.5), ("ids_digest", "0" * 64)],
)
def test_a_manifest_that_describes_its_shards_wrongly_is_refused(cache, name, value):
    manifest = load_manifest(cache)
    shards = list(manifest.shards)
    shards[1] = dataclasses.replace(shards[1], **{name: value})
    sums = ("rows", "branches", "tokens")
    totals = {total: sum(getattr(shard, total) for shard in shards) for total in sums}
    wrong = dataclasses.replace(manifest, shards=tuple(shards), **totals)
    cache.manifest.unlink()
    write_manifest(cache, wrong)
    with pytest.raises(CorruptionError, match=rf"unit 1: its manifest says {name} {value} instead"):
        verify_cache(cache)
