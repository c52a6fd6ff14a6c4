"""Tables: the manifest is written last, names the bytes, and is the same for the same content."""

import json

import polars as pl
import pytest

from align.schemas.errors import CorruptionError, FingerprintError, UsageError
from align.schemas.samples import Drawing
from align.stages.storage.tables import TableFolder, read_table

TABLE = pl.DataFrame({"prompt": ["a", "b"], "score": [1.0, None]})


def published(table_folder, table=TABLE, **more):
    how = {"made_from": {"prompts": "p"}, "settings": {"n": 2}, "counts": {"rows": 2}} | more
    return table_folder.publish(table, **how)


@pytest.fixture
def table_folder(tmp_path):
    made = TableFolder.at(str(tmp_path / "out"), "samples")
    made.prepare()
    return made


def test_what_is_published_is_read_back(table_folder):
    manifest = published(table_folder)
    found, table = read_table(table_folder)
    assert found == manifest == table_folder.find()
    assert table.equals(TABLE)
    assert (manifest.rows, manifest.made_from) == (2, {"prompts": "p"})


def test_the_root_names_the_content_and_what_it_was_made_from(table_folder, tmp_path):
    root = published(table_folder).root
    other = TableFolder.at(str(tmp_path / "other"), "samples")
    other.prepare()
    assert published(other).root == root
    assert published(other, made_from={"prompts": "q"}).root != root
    assert published(other, TABLE.reverse()).root != root


def test_how_samples_were_drawn_is_kept_beside_the_root(table_folder):
    plain = published(table_folder)
    assert "sampling" not in json.loads(table_folder.manifest.read_bytes())  # as in older tables
    told = published(table_folder, sampling=Drawing(0.7, 1.0, 0))
    assert told.root == plain.root
    assert table_folder.find().sampling == Drawing(0.7, 1.0, 0)


def test_publishing_again_changes_no_file(table_folder):
    published(table_folder)
    before = [path.stat().st_mtime_ns for path in (table_folder.file, table_folder.manifest)]
    published(table_folder)
    assert [
        path.stat().st_mtime_ns for path in (table_folder.file, table_folder.manifest)
    ] == before


def test_a_folder_without_a_manifest_is_not_a_finished_table(table_folder):
    assert table_folder.find() is None
    with pytest.raises(UsageError, match="not a finished table of samples"):
        read_table(table_folder)


def test_a_table_of_another_kind_is_refused(table_folder):
    published(table_folder)
    twin = TableFolder(table_folder.root, "judged")
    with pytest.raises(UsageError, match="holds samples, not judged"):
        read_table(twin)


def test_changed_bytes_are_refused(table_folder):
    published(table_folder)
    table_folder.file.write_bytes(table_folder.file.read_bytes() + b" ")
    with pytest.raises(CorruptionError, match="is not what"):
        read_table(table_folder)


def test_a_manifest_cut_short_is_refused(table_folder):
    published(table_folder)
    table_folder.manifest.write_bytes(table_folder.manifest.read_bytes()[:-9])
    with pytest.raises(CorruptionError, match="damaged"):
        read_table(table_folder)


def test_equal_rows_in_other_chunks_are_equal_bytes(table_folder, tmp_path):
    other = TableFolder(tmp_path / "other", "samples")
    other.prepare()
    rows = pl.DataFrame({"n": range(600_000)})
    parts = [rows[:7], rows[7:300_000], rows[300_000:]]
    assert (
        published(other, pl.concat(parts, rechunk=False)).root == published(table_folder, rows).root
    )


def test_a_manifest_of_another_format_is_refused(table_folder):
    published(table_folder)
    text = table_folder.manifest.read_text().replace('"format_version":1', '"format_version":2')
    table_folder.manifest.write_text(text)
    with pytest.raises(FingerprintError, match="has format 2, and this align reads 1"):
        read_table(table_folder)


def test_a_table_in_a_store_is_not_replaced_by_one_of_another_kind(bucket):
    published(TableFolder(bucket / "mixed", "samples"))
    with pytest.raises(UsageError, match="holds samples, not judged"):
        TableFolder(bucket / "mixed", "judged").prepare()


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="not a samples folder"):
        TableFolder(tmp_path, "samples").prepare()


def test_a_table_in_a_store_is_published_and_replaced(bucket):
    table_folder = TableFolder(bucket / "out", "samples")
    table_folder.prepare()
    published(table_folder)
    root = published(table_folder, TABLE.reverse()).root
    manifest, table = read_table(table_folder)
    assert manifest.root == root
    assert table.equals(TABLE.reverse())
    assert table_folder.lock.parent.is_dir()
