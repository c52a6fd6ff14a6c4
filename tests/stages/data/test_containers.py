"""Rows are the same in whatever file or folder they come; of several splits one is taken."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest

from align.schemas.errors import BadDataError, UsageError
from align.stages.data.columns import common_shape
from align.stages.data.files import open_inputs
from align.stages.data.records import read_records
from support.read_rows import parted, write_rows

ROWS = [
    {"prompt": "2;2?", "chosen": '4,\n"four"', "rejected": "5\t"},
    {"prompt": "Grüße?", "chosen": "Servus 👋", "rejected": " no "},
    {"prompt": "Why?", "chosen": "So.", "rejected": "[1, 2"},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, indent=2, ensure_ascii=False).encode()
PLAIN = json.dumps([{**row, "id": index} for index, row in enumerate(ROWS)]).encode()


def gzipped(content):
    """Compressed at no time, so that the names of cases are the same everywhere."""
    return gzip.compress(content, mtime=0)


def packed(data, codec):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def separated(by, mark=b""):
    def cell(text):
        return '"' + text.replace('"', '""') + '"'

    lines = [by.join(ROWS[0]), *(by.join(map(cell, row.values())) for row in ROWS)]
    return mark + "\r\n".join(lines).encode()


FILES = {
    "a.jsonl.gz": gzipped(LINES),
    "A.JSONL.GZ": gzipped(LINES[:40]) + gzipped(LINES[40:]),  # as `cat` joins two
    "a.jsonl.zst": packed(LINES, "zstd"),
    "a.ndjson.zst": packed(LINES[:40], "zstd") + packed(LINES[40:], "zstd"),
    "a.json.gz": gzipped(b"\xef\xbb\xbf" + ARRAY),
    "a.tsv": separated("\t"),
    "a.csv": separated(";"),
    "mark.csv": separated(";", b"\xef\xbb\xbf"),
    "tabs.csv": separated("\t"),
    "commas.csv": separated(","),
    "a.csv.gz": gzipped(separated(";")),
    "a.tsv.zst": packed(separated("\t"), "zstd"),
    "data.json": b'{"data": ' + PLAIN + b"}\n",
    "facts.json": b'\n {"version": "1.1", "rows": 3,\n "data" : ' + ARRAY + b"\n}\n",
    "inside.json.zst": packed(b'\xef\xbb\xbf{"data":' + PLAIN + b"}", "zstd"),
}


def read(*paths, split=""):
    """The prompt, chosen and rejected of every row, in order."""
    inputs = open_inputs(list(map(str, paths)), split)
    shape = common_shape(inputs, {})
    records, rejected = parted(read_records(inputs, shape))
    assert not rejected
    return [(one.prompt, *one.completions) for one in records]


@pytest.mark.parametrize("name", FILES)
def test_a_row_is_the_same_in_every_container(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    assert read(tmp_path / name) == [tuple(row.values()) for row in ROWS]
    assert read(tmp_path) == read(tmp_path / name)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(("gz", "zst", "GZ"))])
def test_a_compressed_file_that_is_cut_is_refused_by_name(tmp_path, name):
    whole = FILES[name]
    for length in (1, 10, len(whole) // 3, len(whole) - 9, len(whole) - 1):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises((UsageError, BadDataError), match=name):
            read(tmp_path / name)


def test_lines_that_begin_with_an_array_named_data_are_lines(tmp_path):
    lines = [{"data": [{"role": "user", "content": "Hi?"}], "chosen": "a", "rejected": "b"}] * 2
    write_rows(tmp_path / "a.jsonl", lines)
    inputs = open_inputs([str(tmp_path / "a.jsonl")])
    shape = common_shape(inputs, {"prompt": "data"})
    found = [one.prompt for one in read_records(inputs, shape)]
    assert found == [tuple(lines[0]["data"])] * 2


def hub_folder(root, *names):
    """A data set as it is downloaded, each file with a row that names it."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        row = {"prompt": name, "chosen": "yes", "rejected": "no"}
        write_rows(root / name, [row])
    (root / "README.md").write_text("---\nlicense: mit\n---\n")
    (root / ".gitattributes").write_text("*.parquet filter=lfs\n")
    return root


TRAIN, TEST = "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"


def test_a_folder_of_the_hub_is_read_and_of_several_splits_the_one_that_is_named(tmp_path):
    one = hub_folder(tmp_path / "one", TRAIN)
    assert [row[0] for row in read(one)] == [TRAIN]
    assert [row[0] for row in read(one, split="train")] == [TRAIN]
    prefs = [f"data/train_{kind}-00000-of-00001.parquet" for kind in ("prefs", "sft")]
    two = hub_folder(tmp_path / "two", *prefs)
    both = hub_folder(tmp_path / "both", TRAIN, TEST)
    assert [row[0] for row in read(two, split="train_sft")] == prefs[1:]
    assert [row[0] for row in read(both, split="test")] == [TEST]
    for path, split, names in (
        (both, "", "both.*test, train.*--split"),
        (two, "", "two.*train_prefs, train_sft.*--split"),
        (both, "dev", "--split dev.*both.*test, train"),
        (one / TRAIN, "train", "train-00000-of-00001.*--split"),
    ):
        with pytest.raises(UsageError, match=names):
            read(path, split=split)


def test_a_split_may_be_a_file_or_a_folder_and_folders_of_others_are_named(tmp_path):
    files = hub_folder(tmp_path / "files", "train.jsonl", "test.jsonl")
    assert [row[0] for row in read(files, split="test")] == ["test.jsonl"]
    folders = hub_folder(tmp_path / "folders", "train/0.parquet", "test/0.parquet")
    assert [row[0] for row in read(folders, split="train")] == ["train/0.parquet"]
    with pytest.raises(UsageError, match="folders.*test, train"):
        read(folders)
    saved = tmp_path / "saved"
    for split in ("train", "test"):
        hub_folder(saved / split, "0.arrow")
        state = {"_data_files": [{"filename": "0.arrow"}]}
        (saved / split / "state.json").write_text(json.dumps(state))
    Path(saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [row[0] for row in read(saved, split="test")] == ["0.arrow"]
    with pytest.raises(UsageError, match="saved.*train, test"):
        read(saved, split="dev")
    with pytest.raises(UsageError, match="--split test"):
        read(saved / "test", split="test")
