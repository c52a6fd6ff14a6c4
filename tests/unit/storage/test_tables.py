"""Tables: published in one step, read back as they were, refused when they are damaged."""

import errno
import os
import shutil
from dataclasses import replace

import polars as pl
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import AlignError, CorruptionError, StorageError, UsageError
from align.schemas.samples import Distribution
from align.stages.storage import tables
from align.stages.storage.disk.locks import lock_of
from align.stages.storage.remote import Remote
from align.stages.storage.tables import TableFolder, distribution_of, read_table
from support import disk_faults
from support.flips import flip_bits
from support.refusals import refuses

TABLE = pl.DataFrame({"prompt": ["a", "b"], "score": [1.0, None], "nothing": [None, None]})


def published(table_folder, table=TABLE, **more):
    how = {"made_from": {"prompts": "p"}, "settings": {"n": 2}, "counts": {"rows": 2}} | more
    return table_folder.publish(table, **how)


@pytest.fixture(params=["disk", "bucket"])
def table_folder(request, tmp_path):
    root = tmp_path if request.param == "disk" else request.getfixturevalue("bucket")
    made = TableFolder.at(f"{root}/out", "samples")
    made.prepare()
    return made


@pytest.fixture
def on_disk(tmp_path):
    made = TableFolder.at(str(tmp_path / "on disk"), "samples")
    made.prepare()
    return made


def test_what_is_published_is_read_back_and_may_be_replaced(table_folder):
    assert table_folder.find() is None
    with refuses(UsageError, "samples.parquet", "align sample"):
        read_table(table_folder)
    manifest = published(table_folder)
    found, table = read_table(table_folder)
    assert found == manifest == table_folder.find() == published(table_folder)
    assert table.equals(TABLE)
    assert (manifest.rows, manifest.made_from, manifest.settings) == (2, {"prompts": "p"}, {"n": 2})
    assert published(table_folder, TABLE.reverse()).root != manifest.root
    assert read_table(table_folder)[1].equals(TABLE.reverse())
    assert published(table_folder, TABLE.clear()).rows == 0
    assert read_table(table_folder)[1].equals(TABLE.clear())
    assert lock_of(table_folder.root).parent.is_dir()


def test_a_table_that_is_published_again_is_the_same_file(on_disk):
    manifest, before = published(on_disk), on_disk.file.stat()
    assert published(on_disk) == manifest
    after = on_disk.file.stat()  # but for the time of access, which reading it changes
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert {path.name for path in on_disk.root.iterdir()} == {"samples.parquet", "_align"}


def test_the_root_names_the_content_and_what_it_was_made_from(on_disk, tmp_path):
    root = published(on_disk).root
    other = TableFolder(tmp_path / "other", "samples")
    other.prepare()
    assert published(other).root == root
    assert published(other, made_from={"prompts": "q"}).root != root
    assert published(other, TABLE.reverse()).root != root
    rows = pl.DataFrame({"n": range(200_000)})
    chunks = pl.concat([rows[:7], rows[7:100_000], rows[100_000:]], rechunk=False)
    assert published(other, chunks).root == published(on_disk, rows).root


def test_a_table_is_written_and_read_one_row_group_at_a_time(table_folder, monkeypatch):
    """So one above any limit of a buffer is read back; a row group of 16 rows stands for it."""
    monkeypatch.setattr(tables, "ROWS", 16)
    turns = [[{"role": "user", "content": "x" * number}] for number in range(100)]
    rows = pl.DataFrame({"prompt": turns, "score": [None, 0.5] * 50})
    manifest = published(table_folder, rows)
    found, table = read_table(table_folder)
    assert (found, found.rows) == (manifest, 100)
    assert table.equals(rows)
    groups = pq.read_metadata(table_folder.stored())
    sizes = [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
    assert sizes == [16] * 6 + [4]


def test_a_table_says_how_its_samples_were_drawn(on_disk):
    published(on_disk)
    assert distribution_of(on_disk.file) is None
    published(on_disk, sampling=Distribution(0.7, 1.0, 0))
    assert distribution_of(on_disk.file) == on_disk.find().sampling == Distribution(0.7, 1.0, 0)
    on_disk.file.write_bytes(b"damaged")
    assert distribution_of(on_disk.file) is None


def test_a_flipped_bit_is_refused_with_the_file_or_changes_nothing(on_disk):
    published(on_disk)
    whole, good, found = read_table(on_disk), on_disk.file.read_bytes(), 0
    for _ in flip_bits(on_disk.file):
        try:
            manifest, table = read_table(on_disk)
            assert (manifest.root, manifest.settings) == (whole[0].root, whole[0].settings)
            assert table.equals(whole[1])
        except AlignError as error:
            found += 1
            assert "samples.parquet" in str(error)  # noqa: PT017
    assert found > 20
    for damaged in (b"", good[:-1], good[: len(good) // 2], good[1:], b"PAR2" + good[4:]):
        on_disk.file.write_bytes(damaged)
        with refuses(CorruptionError, "samples.parquet"):
            read_table(on_disk)


def test_a_table_of_another_kind_is_neither_read_nor_replaced(table_folder, tmp_path):
    published(table_folder)
    other = TableFolder(table_folder.root, "judged", table_folder.url)
    places = [other.root, *([tmp_path / "another machine"] if other.url else [])]
    for refused in (
        lambda: read_table(other),
        *(replace(other, root=place).prepare for place in places),
    ):
        with refuses(UsageError, "judged"):
            refused()
    # A copy under the name of the other kind.
    if other.url:
        Remote(other.url).put("judged.parquet", table_folder.stored())
    else:
        shutil.copy(table_folder.file, other.file)
    with refuses(UsageError, "samples", "judged.parquet", "align judge"):
        read_table(other)


@pytest.mark.parametrize("operation", ["fsync", "rename"])
def test_a_full_disk_leaves_the_table_that_was_there(on_disk, operation):
    published(on_disk)

    def full(op):
        if op.name == operation:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with disk_faults.watch(full), pytest.raises(StorageError) as refused:
        published(on_disk, TABLE.reverse())
    assert refused.value.exit_code == 74
    assert read_table(on_disk)[1].equals(TABLE)
    assert {path.name for path in on_disk.root.iterdir()} == {"samples.parquet", "_align"}
