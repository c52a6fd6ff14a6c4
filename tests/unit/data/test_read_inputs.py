"""Files and folders are found and opened, of one shape and one split, or refused at once."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import UsageError
from align.stages.data.columns import common_shape, detect_shape
from align.stages.data.files import InputFile, open_inputs, require_one_split
from support.read_rows import write_rows

BATCH = pa.record_batch({"chosen": ["c"], "rejected": ["r"]})


def write_arrow(path, batches=1, opener=pa.ipc.new_stream, **options):
    written = pa.ipc.IpcWriteOptions(**options)
    with opener(str(path), BATCH.schema, options=written) as writer:
        for _ in range(batches):
            writer.write_batch(BATCH)
    return path.read_bytes()


def saved_dataset(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        write_arrow(folder / name)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text("{}")


def names_in(*paths):
    return [file.path.name for file in open_inputs(list(map(str, paths)))]


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path):
    for name in ("b.arrow", "a.arrow", "_hidden.arrow", ".dot.arrow"):
        write_arrow(tmp_path / name)
    (tmp_path / "README.md").write_text("about")
    assert names_in(tmp_path) == ["a.arrow", "b.arrow"]
    saved_dataset(tmp_path, "data-1.arrow", "data-0.arrow")
    assert names_in(tmp_path) == ["data-1.arrow", "data-0.arrow"]
    (tmp_path / "data-0.arrow").unlink()
    with pytest.raises(UsageError, match=r"data-0\.arrow"):
        names_in(tmp_path)


def test_a_dataset_of_several_splits_needs_a_choice(tmp_path):
    for split in ("train", "test"):
        saved_dataset(tmp_path / split, f"{split}.arrow")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert names_in(tmp_path) == ["test.arrow"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [file.path.name for file in open_inputs([str(tmp_path)], "test")] == ["test.arrow"]
    for path, split, names in (
        (tmp_path, "", "train, test.*--split"),
        (tmp_path, "dev", "train, test.*--split"),
        (tmp_path / "test", "test", "--split test"),
    ):
        with pytest.raises(UsageError, match=names):
            open_inputs([str(path)], split)


@pytest.mark.parametrize("content", ["[]", "{", '{"_data_files": 3}', '{"_data_files": []}'])
def test_a_list_of_files_that_datasets_did_not_write_is_refused(tmp_path, content):
    saved_dataset(tmp_path, "x.arrow")
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UsageError, match=r"state\.json.*'_data_files'"):
        names_in(tmp_path)


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_folder_that_lacks_a_numbered_file_is_refused(tmp_path, is_saved):
    first, second, last = (f"train-0000{number}-of-00003.arrow" for number in range(3))
    for lacking, there in ((second, (first, last)), (last, (first, second))):
        folder = tmp_path / lacking
        saved_dataset(folder, *there)
        if not is_saved:
            (folder / "state.json").unlink()
        with pytest.raises(UsageError, match=lacking[:20]):
            names_in(folder)
        assert len(names_in(*(folder / name for name in there))) == 2
        if not is_saved:
            write_arrow(folder / lacking)
            assert len(names_in(folder)) == 3


TRAIN, TEST = "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"
PREFS = [f"data/train_{kind}-00000-of-00001.parquet" for kind in ("prefs", "sft")]
FOLDERS = ["test/0.parquet", "train/0.parquet"]


@pytest.mark.parametrize(
    ("files", "split", "taken"),
    [
        ([TRAIN], "", [TRAIN]),
        ([TRAIN], "train", [TRAIN]),
        (PREFS, "train_sft", PREFS[1:]),
        (PREFS, "", "train_prefs, train_sft.*--split"),
        ([TEST, TRAIN], "test", [TEST]),
        ([TEST, TRAIN], "", "test, train.*--split"),
        ([TEST, TRAIN], "dev", "--split dev.*test, train"),
        (["test.jsonl", "train.jsonl"], "test", ["test.jsonl"]),
        (FOLDERS, "train", FOLDERS[1:]),
        (FOLDERS, "", "test, train"),
    ],
)
def test_of_several_splits_of_a_folder_the_one_that_is_named_is_read(tmp_path, files, split, taken):
    """As the Hub has them; a split may be a file or a folder."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name, [{"prompt": name, "chosen": "yes", "rejected": "no"}])
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / ".gitattributes").write_text("*.parquet filter=lfs\n")
    if isinstance(taken, str):
        with pytest.raises(UsageError, match=taken) as caught:
            open_inputs([str(tmp_path)], split)
        assert str(tmp_path) in str(caught.value)
        return
    found = open_inputs([str(tmp_path)], split)
    assert [file.path.relative_to(tmp_path).as_posix() for file in found] == taken
    with pytest.raises(UsageError, match="--split"):  # one file has no splits
        open_inputs([str(tmp_path / taken[0])], "train")


@pytest.mark.parametrize(("lacking", "legacy"), [(0, True), (1, False), (2, False)])
def test_a_stream_that_is_cut_at_a_batchs_end_is_refused(tmp_path, lacking, legacy):
    whole = write_arrow(tmp_path / "whole.arrow", 3, use_legacy_format=legacy)
    less = write_arrow(tmp_path / "less.arrow", 3 - lacking, use_legacy_format=legacy)
    end = 4 if legacy else 8  # bytes of the marker
    (tmp_path / "cut.arrow").write_bytes(whole[: len(less) - end])
    assert names_in(tmp_path / "whole.arrow", tmp_path / "less.arrow")
    with pytest.raises(UsageError, match=r"cut\.arrow"):
        names_in(tmp_path / "cut.arrow")


def test_streams_that_were_joined_are_refused(tmp_path):
    path = tmp_path / "a.arrow"
    path.write_bytes(write_arrow(path) * 2)
    with pytest.raises(UsageError, match=r"a\.arrow"):
        names_in(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"hello"),
        ("a.jsonl", b""),
        ("a.jsonl", b"hello\nyou\n"),
        ("a.jsonl", '{"prompt": 1}'.encode("utf-16")),
        ("a.json", b'[{"prompt": 1}'),
        ("a.json", b'[{"prompt": 1}] {}'),
        ("a.json", b'[{"prompt": 1} {"prompt": 2}]'),
        ("a.json", b'[{"prompt": 1},]'),
        ("a.json", b'{"data": [{"prompt": 1}], "test": []}'),
        ("a.json", b'{"data": [{"prompt": 1}]}{}'),
        ("a.json", b'{"data": [{"prompt": 1}]'),
        ("a.json", b'{"data": []}'),
        ("a.json", b'{"data": [1, 2]}'),
        ("a.json", b'{"prompt":\n1}'),
        ("a.jsonl.gz", b'{"prompt": 1}'),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)),
        ("a.jsonl.zst", gzip.compress(b'{"prompt": 1}', mtime=0)),
        ("a.csv.gz", gzip.compress("prompt,chosen".encode("utf-16"), mtime=0)),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0)),
        ("a.csv", b'prompt,chosen\n"a'),
        ("a.parquet", b"PAR1 is not enough"),
        ("a.arrow", b"\xff\xff\xff\xff\x10\x00\x00"),
        ("a.feather", b"ARROW1\x00\x00 is not enough"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_at_once_in_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        names_in(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_holds_nothing_or_is_given_twice_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"chosen": "c", "rejected": "r"}')
    (tmp_path / "a.csv").write_text("chosen,rejected\nc,r\n")
    (tmp_path / "empty").mkdir()
    write_arrow(tmp_path / "file.arrow", 0, pa.ipc.new_file)
    write_arrow(tmp_path / "stream.arrow", 0)
    pq.write_table(BATCH.schema.empty_table(), tmp_path / "empty.parquet")
    for files, name in [
        *(([tmp_path / name], name) for name in ("file.arrow", "stream.arrow", "empty.parquet")),
        ([], "file or folder"),
        ([tmp_path / "b.jsonl"], r"b\.jsonl"),
        ([tmp_path / "empty"], "empty"),
        ([tmp_path / "a.jsonl", tmp_path / "empty" / ".." / "a.jsonl"], r"a\.jsonl.*twice"),
        ([tmp_path], r"a\.csv and "),
    ]:
        with pytest.raises(UsageError, match=name):
            names_in(*files)


def detect(columns, mapped=None, carry=()):
    return detect_shape(columns.split(), mapped or {}, carry, where="a.csv")


def test_scores_of_a_pair_have_two_names_and_others_are_not_read():
    ultrafeedback = detect("prompt chosen rejected score_chosen score_rejected")
    assert ultrafeedback.source["chosen_score"] == "score_chosen"
    assert ultrafeedback.unread == ()
    columns = "prompt chosen rejected chosen_score rejected-rating Reward id"
    assert detect(columns).unread == ("rejected-rating", "Reward", "id")
    assert detect(columns, carry=["Reward"]).unread == ("rejected-rating", "id")
    mapped = {"Reward": "", "rejected_score": "rejected-rating"}
    assert detect(columns, mapped).unread == ("id",)


def test_a_column_is_read_under_the_users_name_or_left_out():
    shape = detect("question chosen rejected", {"prompt": "question"})
    assert (bool(shape.declared.prompt), shape.source["prompt"]) == (True, "question")
    assert {*shape.columns} >= {"question", "chosen", "rejected"}
    assert "prompt" not in shape.columns
    assert not detect("prompt chosen rejected", {"prompt": ""}).declared.prompt
    assert detect("prompt question chosen rejected", {"old": "prompt", "prompt": "question"})
    assert detect("conversations chosen rejected", {"prompt": "conversations"}).name == "paired"
    shape = detect("chosen rejected tools margin length", carry=["length"])
    assert (shape.optional, shape.carried) == (("tools",), ("margin", "length"))


@pytest.mark.parametrize(
    ("columns", "mapped", "carry", "names"),
    [
        ("question chosen reject", {}, (), "'question', 'chosen', 'reject'.*rejected=reject"),
        ("question chosen rejected", {}, (), "'question'.*prompt=question"),
        ("chosen rejected role", {}, ("role",), "'role'"),
        ("prompt chosen rejected completions scores", {}, (), "paired .*scored "),
        ("prompt completion label score", {}, (), "unpaired .*scored_long "),
        ("prompt completion score answers", {}, (), "scored_long .*Nectar "),
        ("chosen rejected", {"prompt": "questoin"}, (), "'questoin'"),
        ("chosen rejected margn", {}, ("margin",), "'margin'.*'margn'"),
        ("chosen rejected chosen", {}, (), "'chosen'"),
        ("prompt chosen rejected chosen_score score_chosen", {}, (), "'chosen_score'"),
        ("prompt question chosen rejected", {"prompt": "question"}, (), "'prompt'"),
    ],
)
def test_what_fits_no_shape_or_several_is_refused_by_its_columns(columns, mapped, carry, names):
    with pytest.raises(UsageError, match=rf"a\.csv.*{names}"):
        detect(columns, mapped, carry)


PAIR = {"chosen": "c", "rejected": "r"}


def shape_of_files(folder, *files):
    paths = [write_rows(folder / f"{number}.jsonl", rows) for number, rows in enumerate(files)]
    return common_shape(open_inputs(paths), {})


def test_files_of_two_shapes_are_refused_by_name(tmp_path):
    for first, other in (
        (PAIR, {"prompt": "p", "completion": "c", "label": True}),
        (PAIR, {"prompt": "p"} | PAIR),
        (PAIR, PAIR | {"margin": 1}),
        (PAIR | {"score_chosen": 1}, PAIR | {"chosen_score": 1}),
    ):
        with pytest.raises(UsageError, match=r"0\.jsonl and .*1\.jsonl"):
            shape_of_files(tmp_path, [first], [other])


def refusal_of(*names):
    """What is said of files with these paths; nothing if they are taken together."""
    files = [InputFile(Path(name), Path(name).suffix, 1) for name in names]
    try:
        require_one_split(files)
    except UsageError as error:
        return str(error)
    return ""


HUB = ["d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet"]
HUB_TEST = "d/test-00000-of-00001.parquet"


def test_splits_of_one_data_set_are_refused():
    for names in (
        [*HUB, HUB_TEST],
        ["train.jsonl", "test.jsonl"],
        ["d/Train.csv", "d/validation.csv"],
        ["d/train_prefs-00000-of-00001.parquet", "d/test_prefs-00000-of-00001.parquet"],
        ["d/train/data-00000-of-00001.arrow", "d/test/data-00000-of-00001.arrow"],
        ["test/train.parquet", "test/test.parquet"],
    ):
        assert refusal_of(*names), names
        assert refusal_of(*reversed(names)), names
    for names in (
        [*HUB, "both/test-00000-of-00001.parquet"],  # a link, on purpose
        ["d/train_prefs.jsonl", "d/train_sft.jsonl"],
        ["d/train.jsonl", "e/test.jsonl"],
        ["d/train.jsonl", "d/unit_test_questions.jsonl"],
        ["d/hh_train.jsonl", "d/shp_test.jsonl"],
    ):
        assert not refusal_of(*names), names
