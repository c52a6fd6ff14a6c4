import dataclasses
import os
import random
import shutil

import pyarrow.parquet as pq
import pytest

from align.schemas.errors import CorruptionError
from align.stages.storage.manifest_file import load_manifest, root_of, write_manifest
from align.stages.storage.shards import iter_row_groups, read_shard, write_shard
from align.stages.storage.verify_cache import check_shard, damaged_units, verify_cache
from support.made_caches import block_of, in_child


@pytest.fixture
def shard(cache):
    return cache.data / load_manifest(cache).shards[1].file


def test_a_flipped_bit_anywhere_in_a_shard_is_noticed(cache, shard):
    assert verify_cache(cache) == load_manifest(cache)
    commit, good = load_manifest(cache).shards[1], shard.read_bytes()
    draw = random.Random(1)
    for place in draw.sample(range(len(good)), min(1_500, len(good))):
        put_byte(shard, place, good[place] ^ 1 << draw.randrange(8))
        with pytest.raises(CorruptionError, match="unit 1"):
            check_shard(cache, commit)
        put_byte(shard, place, good[place])
    check_shard(cache, commit)


def put_byte(path, place, byte):
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([byte]))


def test_a_flipped_bit_in_a_page_never_gives_a_wrong_value(tmp_path):
    """With the digest out of the way: the page checksums alone, in a child that may crash."""
    path = tmp_path / "shard"
    write_shard(path, block_of(300, 1, token_logps=True))
    good, table = path.read_bytes(), pq.read_table(path)
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    draw = random.Random(2)

    def flip():
        wrong = 0
        for place in draw.sample(range(4, footer), 500):
            put_byte(path, place, good[place] ^ 1 << draw.randrange(8))
            try:
                read_shard(path)
                found = list(iter_row_groups(path))
                wrong += not found[0].equals(table)
            except CorruptionError:
                pass
            put_byte(path, place, good[place])
        assert wrong == 0

    assert in_child(flip) == 0


DAMAGE = {
    "cut": lambda good: good[: len(good) // 3],
    "longer": lambda good: good + b"\0",
    "empty": lambda good: b"",
    "a hole": lambda good: good[:64] + bytes(64) + good[128:],
    "zeros": lambda good: bytes(len(good)),
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
    write_manifest(cache, dataclasses.replace(wrong, root=root_of(wrong)))
    with pytest.raises(CorruptionError, match=rf"unit 1: its manifest says {name} {value} instead"):
        verify_cache(cache)
