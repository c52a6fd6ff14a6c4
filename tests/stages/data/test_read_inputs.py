"""Files and folders are found and opened, or refused at once."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import UsageError
from align.stages.data.input_files import open_inputs


def write_arrow_stream(path: Path, batches=1, **options):
    batch = pa.record_batch({"chosen": ["c"], "rejected": ["r"]})
    written = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(str(path), batch.schema, options=written) as writer:
        for _ in range(batches):
            writer.write_batch(batch)


def saved_dataset(folder: Path, names):
    folder.mkdir(parents=True)
    for name in names:
        write_arrow_stream(folder / name)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path):
    saved_dataset(tmp_path / "ds", ["data-1.arrow", "data-0.arrow"])
    write_arrow_stream(tmp_path / "ds" / "cache-1.arrow")
    inputs = open_inputs([str(tmp_path / "ds")])
    assert [file.path.name for file in inputs] == ["data-1.arrow", "data-0.arrow"]


def test_a_dataset_of_several_splits_asks_for_one(tmp_path):
    for split in ("train", "test"):
        saved_dataset(tmp_path / split, ["data-0.arrow"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match=r"splits train, test\. Name one .*/train"):
        open_inputs([str(tmp_path)])


def test_a_dataset_of_one_split_is_that_split(tmp_path):
    saved_dataset(tmp_path / "train", ["data-0.arrow"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert open_inputs([str(tmp_path)])[0].path == tmp_path / "train" / "data-0.arrow"


@pytest.mark.parametrize(
    "state", ["[]", "{", '{"_data_files": 3}', '{"_data_files": [{"filename": "../x.arrow"}]}']
)
def test_files_that_are_not_a_state_are_refused(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UsageError, match="_data_files"):
        open_inputs([str(tmp_path)])


@pytest.mark.parametrize("splits", ['[".."]', '[""]', '["a/b"]', '["/"]', "[" * 100_000])
def test_a_split_is_a_folder_of_its_dataset(tmp_path, splits):
    saved_dataset(tmp_path / "ds", ["data-0.arrow"])
    saved_dataset(tmp_path / "ds" / "a" / "b", ["data-0.arrow"])
    (tmp_path / "ds" / "dataset_dict.json").write_text(f'{{"splits": {splits}}}')
    with pytest.raises(UsageError, match="does not list 'splits'"):
        open_inputs([str(tmp_path / "ds")])


def test_a_saved_dataset_without_one_of_its_files_is_refused(tmp_path):
    saved_dataset(tmp_path / "ds", ["data-0.arrow"])
    (tmp_path / "ds" / "data-0.arrow").unlink()
    with pytest.raises(UsageError, match=r"lacks data-0\.arrow"):
        open_inputs([str(tmp_path / "ds")])


@pytest.mark.parametrize("lacking", [0, 1, 2])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_stream_that_is_cut_at_a_batchs_end_is_refused_with_the_way_to_end_it(
    tmp_path, monkeypatch, lacking, legacy
):
    write_arrow_stream(tmp_path / "whole.arrow", 3, use_legacy_format=legacy)
    write_arrow_stream(tmp_path / "less.arrow", 3 - lacking, use_legacy_format=legacy)
    end = 4 if legacy else 8  # bytes of the marker
    cut = (tmp_path / "whole.arrow").read_bytes()[: (tmp_path / "less.arrow").stat().st_size - end]
    (tmp_path / "cut.arrow").write_bytes(cut)
    with pytest.raises(UsageError, match=r"cut\.arrow.* end-of-stream marker") as caught:
        open_inputs([str(tmp_path / "cut.arrow")])
    monkeypatch.chdir(tmp_path)
    exec("import pyarrow; " + re.search(r"t = .*close\(\)", str(caught.value))[0])
    open_inputs(["whole.arrow"])
    assert pa.ipc.open_stream("whole.arrow").read_all().num_rows == 3 - lacking


def test_a_stream_of_a_saved_dataset_that_is_cut_is_refused_by_name(tmp_path):
    saved_dataset(tmp_path / "ds", ["data-0.arrow", "data-1.arrow"])
    second = tmp_path / "ds" / "data-1.arrow"
    second.write_bytes(second.read_bytes()[:-8])
    with pytest.raises(UsageError, match=r"data-1\.arrow .* end-of-stream marker"):
        open_inputs([str(tmp_path / "ds")])


def test_a_stream_behind_which_another_begins_is_refused(tmp_path):
    write_arrow_stream(tmp_path / "a.arrow")
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(whole + whole)
    with pytest.raises(UsageError, match=r"a\.arrow .* follow the end of the stream"):
        open_inputs([str(tmp_path / "a.arrow")])


def test_a_file_whose_footer_names_other_batches_than_it_holds_is_refused(tmp_path):
    batch = pa.record_batch({"chosen": ["c"], "rejected": ["r"]})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), batch.schema) as writer:
        for _ in range(3):
            writer.write_batch(batch)
    whole = (tmp_path / "a.arrow").read_bytes()
    second = whole.index(b"\xff\xff\xff\xff", whole.index(b"\xff\xff\xff\xff", 12) + 4)
    (tmp_path / "a.arrow").write_bytes(whole[:second] + bytes(8) + whole[second + 8 :])
    with pytest.raises(UsageError, match=r"1 batches, and its footer names 3"):
        open_inputs([str(tmp_path / "a.arrow")])


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_folder_that_lacks_a_file_which_the_names_of_others_count_is_refused(tmp_path, is_saved):
    names = [f"train-0000{number}-of-00003.arrow" for number in (0, 2)]
    saved_dataset(tmp_path / "ds", names)
    if not is_saved:
        (tmp_path / "ds" / "state.json").unlink()
    with pytest.raises(UsageError, match=r"lacks 1 of the 3 .*train-00001-of-00003"):
        open_inputs([str(tmp_path / "ds")])
    assert len(open_inputs([str(tmp_path / "ds" / name) for name in names])) == 2
    write_arrow_stream(tmp_path / "ds" / "train-00001-of-00003.arrow")
    if not is_saved:
        assert len(open_inputs([str(tmp_path / "ds")])) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"hello", "ending that is not known"),
        ("a.jsonl", b"", "0 bytes"),
        ("a.jsonl", b"\n \n", "no rows"),
        ("a.jsonl", b"hello\nyou\n", "not JSON objects"),
        ("a.jsonl", '{"prompt": 1}'.encode("utf-16"), "UTF-16"),
        ("a.json", b"[]", "no rows"),
        ("a.json", b'[{"prompt": 1}', "element 0 of the array is cut off"),
        ("a.json", b'[{"prompt": 1} ', "element 0 of the array is followed by the end"),
        ("a.json", b'[{"prompt": 1}] {}', "after the closing"),
        ("a.json", b'[{"prompt": 1}, {"a": }]', "element 1 of the array is not valid JSON"),
        ("a.json", b'[{"prompt": 1}, {"a', "element 1 of the array is cut off"),
        ("a.json", b'[{"prompt": 1},]', "element 1"),
        ("a.json", b'[{"prompt": 1} {"prompt": 2}]', "element 0 of the array is followed by"),
        ("a.csv", b"prompt,chosen\n", "no rows"),
        ("a.csv", b'prompt,chosen\n"a', "line 2 is not valid CSV"),
        ("a.parquet", b"PAR1 is not enough", "cannot be read as parquet"),
        ("a.arrow", b"ARROW1 is not enough", "cannot be read as arrow"),
        ("a.arrow", b"\xff\xff\xff\xff\x10\x00\x00", "cannot be read as arrow"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_at_once(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        open_inputs([str(tmp_path / name)])
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_a_columnar_file_without_rows_is_refused(tmp_path, name):
    schema = pa.schema([("prompt", pa.string())])
    if name == "a.parquet":
        pq.write_table(schema.empty_table(), tmp_path / name)
    else:
        opener = pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
        opener(str(tmp_path / name), schema).close()
    with pytest.raises(UsageError, match="has no rows"):
        open_inputs([str(tmp_path / name)])


def test_what_is_not_there_or_given_twice_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"chosen": "c", "rejected": "r"}')
    (tmp_path / "a.csv").write_text("chosen,rejected\nc,r\n")
    (tmp_path / "empty").mkdir()
    for files, message in [
        ([], "No data files"),
        ([tmp_path / "b.jsonl"], "no such file"),
        ([tmp_path / "empty"], "holds no data files"),
        ([tmp_path / "a.jsonl", tmp_path / "empty" / ".." / "a.jsonl"], "given twice"),
        ([tmp_path], r"two kinds, a\.csv and a\.jsonl"),
    ]:
        with pytest.raises(UsageError, match=message):
            open_inputs(list(map(str, files)))
