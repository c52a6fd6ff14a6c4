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


def test_what_is_published_is_read_back_and_changes_no_file_when_published_again(table_folder):
    assert table_folder.find() is None
    with pytest.raises(UsageError, match="not a finished table of samples"):
        read_table(table_folder)
    manifest = published(table_folder)
    files = (table_folder.file, table_folder.manifest)
    times = [path.stat().st_mtime_ns for path in files]
    found, table = read_table(table_folder)
    assert found == manifest == table_folder.find() == published(table_folder)
    assert [path.stat().st_mtime_ns for path in files] == times
    assert table.equals(TABLE)
    assert (manifest.rows, manifest.made_from) == (2, {"prompts": "p"})


def test_the_root_names_the_content_and_what_it_was_made_from(table_folder, tmp_path):
    root = published(table_folder).root
    other = TableFolder.at(str(tmp_path / "other"), "samples")
    other.prepare()
    assert published(other).root == root
    assert published(other, made_from={"prompts": "q"}).root != root
    assert published(other, TABLE.reverse()).root != root
    rows = pl.DataFrame({"n": range(600_000)})
    chunks = pl.concat([rows[:7], rows[7:300_000], rows[300_000:]], rechunk=False)
    assert published(other, chunks).root == published(table_folder, rows).root


def test_how_samples_were_drawn_is_kept_beside_the_root(table_folder):
    plain = published(table_folder)
    assert "sampling" not in json.loads(table_folder.manifest.read_bytes())  # as in older tables
    told = published(table_folder, sampling=Drawing(0.7, 1.0, 0))
    assert told.root == plain.root
    assert table_folder.find().sampling == Drawing(0.7, 1.0, 0)


def replaced(path, old, new):
    held = path.read_bytes()
    assert old in held
    path.write_bytes(held.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "error", "said"),
    [
        ("file", b"PAR1", b"PAR2", CorruptionError, "is not what"),
        ("file", b"PAR1", b"PAR1 ", CorruptionError, "is not what"),
        ("manifest", b"}", b"", CorruptionError, "damaged"),
        ("manifest", b'"format_version":1', b'"format_version":2', FingerprintError, "format 2"),
    ],
)
def test_a_changed_table_is_refused(table_folder, name, old, new, error, said):
    published(table_folder)
    replaced(getattr(table_folder, name), old, new)
    with pytest.raises(error, match=said):
        read_table(table_folder)


def test_a_table_of_another_kind_is_neither_read_nor_replaced(table_folder, bucket):
    published(table_folder)
    with pytest.raises(UsageError, match="holds samples, not judged"):
        read_table(TableFolder(table_folder.root, "judged"))
    published(TableFolder(bucket / "mixed", "samples"))
    with pytest.raises(UsageError, match="holds samples, not judged"):
        TableFolder(bucket / "mixed", "judged").prepare()


def test_a_table_in_a_store_is_published_and_replaced(bucket):
    table_folder = TableFolder(bucket / "out", "samples")
    table_folder.prepare()
    published(table_folder)
    root = published(table_folder, TABLE.reverse()).root
    manifest, table = read_table(table_folder)
    assert manifest.root == root
    assert table.equals(TABLE.reverse())
    assert table_folder.lock.parent.is_dir()
