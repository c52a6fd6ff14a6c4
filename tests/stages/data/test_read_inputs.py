"""Files and folders are found and opened, of one shape and one split, or refused at once."""

import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import UsageError
from align.stages.data.data_schema import common_shape, detect_shape
from align.stages.data.data_splits import require_one_split
from align.stages.data.input_files import InputFile, open_inputs
from align.stages.storage.copies import ORIGIN
from align.stages.storage.disk.digest_memory import user_folder
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


def test_a_folder_is_read_in_sorted_order_and_a_saved_dataset_in_the_order_of_its_state(tmp_path):
    for name in ("b.arrow", "a.arrow", "_hidden.arrow", ".dot.arrow"):
        write_arrow(tmp_path / name)
    (tmp_path / "README.md").write_text("about")
    assert names_in(tmp_path) == ["a.arrow", "b.arrow"]
    saved_dataset(tmp_path, "data-1.arrow", "data-0.arrow")
    assert names_in(tmp_path) == ["data-1.arrow", "data-0.arrow"]
    (tmp_path / "data-0.arrow").unlink()
    with pytest.raises(UsageError, match=r"lacks data-0\.arrow"):
        names_in(tmp_path)


def test_a_dataset_of_one_split_is_that_split_and_of_several_one_is_asked_for(tmp_path):
    for split in ("train", "test"):
        saved_dataset(tmp_path / split, f"{split}.arrow")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert names_in(tmp_path) == ["test.arrow"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match=r"splits train, test\. Name one .*/train"):
        names_in(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("state.json", one) for one in ("[]", "{", '{"_data_files": 3}')),
        ("state.json", '{"_data_files": [{"filename": "../x.arrow"}]}'),
        ("dataset_dict.json", "[" * 100_000),
        *(("dataset_dict.json", f'{{"splits": ["{one}"]}}') for one in ("..", "", "a/b", "/")),
    ],
)
def test_a_saved_dataset_names_nothing_outside_of_its_folder(tmp_path, name, content):
    saved_dataset(tmp_path / "ds", "x.arrow")
    saved_dataset(tmp_path / "ds" / "a" / "b", "x.arrow")
    (tmp_path / "ds" / name).write_text(content)
    with pytest.raises(UsageError, match=rf"{name} does not list '"):
        names_in(tmp_path / "ds")


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_folder_that_lacks_a_file_which_the_names_of_others_count_is_refused(tmp_path, is_saved):
    first, second, last = (f"train-0000{number}-of-00003.arrow" for number in range(3))
    for lacking, there in ((second, (first, last)), (last, (first, second))):
        folder = tmp_path / lacking
        saved_dataset(folder, *there)
        if not is_saved:
            (folder / "state.json").unlink()
        with pytest.raises(UsageError, match=f"lacks 1 of the 3 .*{lacking[:20]}"):
            names_in(folder)
        assert len(names_in(*(folder / name for name in there))) == 2
        if not is_saved:
            write_arrow(folder / lacking)
            assert len(names_in(folder)) == 3


@pytest.mark.parametrize(("lacking", "legacy"), [(0, True), (1, False), (2, False)])
def test_a_stream_that_is_cut_at_a_batchs_end_is_refused(tmp_path, lacking, legacy):
    whole = write_arrow(tmp_path / "whole.arrow", 3, use_legacy_format=legacy)
    less = write_arrow(tmp_path / "less.arrow", 3 - lacking, use_legacy_format=legacy)
    end = 4 if legacy else 8  # bytes of the marker
    (tmp_path / "cut.arrow").write_bytes(whole[: len(less) - end])
    assert names_in(tmp_path / "whole.arrow", tmp_path / "less.arrow")
    with pytest.raises(UsageError, match=rf"cut\.arrow .*behind its batch {3 - lacking}"):
        names_in(tmp_path / "cut.arrow")


def test_streams_that_were_joined_are_refused(tmp_path):
    path = tmp_path / "a.arrow"
    path.write_bytes(write_arrow(path) * 2)
    with pytest.raises(UsageError, match=r"a\.arrow .*behind its batch 1\b"):
        names_in(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"hello", "ending that is not known"),
        ("a.jsonl", b"", "0 bytes"),
        ("a.jsonl", b"hello\nyou\n", "not JSON objects"),
        ("a.jsonl", '{"prompt": 1}'.encode("utf-16"), "UTF-16"),
        ("a.json", b'[{"prompt": 1}', "element 0 of the array is cut off"),
        ("a.json", b'[{"prompt": 1}] {}', "after the closing"),
        ("a.json", b'[{"prompt": 1} {"prompt": 2}]', "element 0 of the array is followed by"),
        ("a.csv", b'prompt,chosen\n"a', "line 2 is not valid CSV"),
        ("a.parquet", b"PAR1 is not enough", "cannot be read as parquet"),
        ("a.arrow", b"\xff\xff\xff\xff\x10\x00\x00", "cannot be read as arrow"),
        ("a.feather", b"ARROW1\x00\x00 is not enough", "cannot be read as feather"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_at_once_in_one_line(
    tmp_path, name, content, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
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
    for files, message in [
        *(([tmp_path / name], "has no rows") for name in ("file.arrow", "stream.arrow")),
        ([tmp_path / "empty.parquet"], "has no rows"),
        ([], "No data files"),
        ([tmp_path / "b.jsonl"], "no such file"),
        ([tmp_path / "empty"], "holds no data files"),
        ([tmp_path / "a.jsonl", tmp_path / "empty" / ".." / "a.jsonl"], "given twice"),
        ([tmp_path], r"two kinds, a\.csv and "),
    ]:
        with pytest.raises(UsageError, match=message):
            names_in(*files)


def detect(columns, rename=None, carry=()):
    return detect_shape(columns.split(), rename or {}, carry, where="a.csv")


def test_the_columns_decide_the_shape():
    for columns, kind in (
        ("chosen rejected", "paired"),
        ("prompt completion label", "unpaired"),
        ("prompt completions scores", "scored"),
        ("prompt_id prompt completion score", "scored_long"),
    ):
        shape = detect(columns)
        assert (shape.kind, shape.has_prompt) == (kind, "prompt" in columns)


def test_columns_that_look_like_scores_and_are_not_read_are_known():
    ultrafeedback = detect("prompt chosen rejected score_chosen score_rejected")
    assert ultrafeedback.source["chosen_score"] == "score_chosen"
    assert ultrafeedback.unread == ()
    columns = "prompt chosen rejected chosen_score rejected-rating Reward id"
    assert detect(columns).unread == ("rejected-rating", "Reward")
    assert detect(columns, carry=["Reward"]).unread == ("rejected-rating",)
    left_out = {"Reward": "unused Reward", "rejected-rating": "rejected_score"}
    assert detect(columns, left_out).unread == ()
    with pytest.raises(UsageError, match="would both be 'chosen_score'"):
        detect("prompt chosen rejected chosen_score score_chosen")


def test_a_column_is_read_under_the_users_name_or_left_out():
    shape = detect("question chosen rejected", {"question": "prompt"})
    assert (shape.has_prompt, shape.source["prompt"]) == (True, "question")
    assert {*shape.columns} >= {"question", "chosen", "rejected"}
    assert "prompt" not in shape.columns
    assert not detect("prompt chosen rejected", {"prompt": "unused"}).has_prompt
    assert detect("prompt question chosen rejected", {"prompt": "old", "question": "prompt"})
    shape = detect("chosen rejected tools margin length", carry=["length"])
    assert (shape.optional, shape.carried) == (("tools",), ("margin", "length"))


@pytest.mark.parametrize(
    ("columns", "rename", "carry", "message"),
    [
        ("question chosen reject", {}, (), r"'question', 'chosen', 'reject'.* --map rejected=reje"),
        ("question chosen rejected", {}, (), r"no column 'prompt' but one named 'question'"),
        ("chosen rejected role", {}, ("role",), r"'role' cannot be carried"),
        ("prompt chosen rejected completions scores", {}, (), r"paired and scored.*--map "),
        ("prompt completion label score", {}, (), r"unpaired with --map score=, or scored_l"),
        ("chosen rejected", {"questoin": "prompt"}, (), r"no column 'questoin' to rename"),
        ("chosen rejected margn", {}, ("margin",), r"no column 'margin' to carry.*'margn'\?"),
        ("chosen rejected chosen", {}, (), r"2 columns named 'chosen'"),
    ],
)
def test_what_fits_no_shape_or_several_is_refused_with_the_way_out(columns, rename, carry, message):
    with pytest.raises(UsageError, match=message) as caught:
        detect(columns, rename, carry)
    assert "a.csv" in str(caught.value)


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
        with pytest.raises(UsageError, match=r"0\.jsonl and .*1\.jsonl hold different data"):
            shape_of_files(tmp_path, [first], [other])


def refusal_of(*names):
    """What is said of files with these paths; nothing if they are taken together."""
    files = [InputFile(Path(name), Path(name).suffix, 1) for name in names]
    try:
        require_one_split(files, "precompute-ref", "cache")
    except UsageError as error:
        return str(error)
    return ""


HUB = ["d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet"]
HUB_TEST = "d/test-00000-of-00001.parquet"


def test_splits_of_one_data_set_are_refused_and_other_files_are_taken_together():
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


def test_the_commands_take_the_files_of_a_split_and_no_others_into_two_folders(tmp_path):
    names = ["train-0.parquet", "train-1.parquet", "test-0.parquet", "test-1.parquet"]
    folder = tmp_path / "my data"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    said = refusal_of(*(str(folder / name) for name in names))
    train, test = [shlex.split(line) for line in said.splitlines() if line.startswith("  align")]
    for command, wanted in ((train, names[:2]), (test, names[2:])):
        assert command[:2] == ["align", "precompute-ref"]
        assert sorted(path.name for path in folder.glob(Path(command[2]).name)) == wanted
    assert (train[3:], test[3:]) == ([], ["--output", "cache-test"])


def test_files_of_a_store_are_known_by_where_they_were_copied_from():
    names = []
    for split in ("train", "test"):
        folder = user_folder() / "remote" / split[::-1]
        folder.mkdir(parents=True)
        (folder / ORIGIN).write_text(f"s3://b/data/{split}-0.jsonl")
        (folder / f"{split}-0.jsonl").touch()
        names.append(str(folder / f"{split}-0.jsonl"))
    assert "\n  align precompute-ref s3://b/data/test-0.jsonl --output" in refusal_of(*names)
