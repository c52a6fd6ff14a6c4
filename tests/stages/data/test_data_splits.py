"""Training rows and held-out rows of one data set are not joined unseen."""

import shlex
from pathlib import Path

import pytest

from align.schemas.errors import UsageError
from align.stages.data.data_splits import require_one_split
from align.stages.data.input_files import InputFile
from align.stages.storage.local_copies import ORIGIN, place


def refusal(*names):
    """What is said of files with these paths; nothing if they are taken together."""
    files = [InputFile(Path(name), Path(name).suffix, 1) for name in names]
    try:
        require_one_split(files, "precompute-ref", "cache")
    except UsageError as error:
        return str(error)
    return ""


HUB = ["d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet"]
HUB_TEST = "d/test-00000-of-00001.parquet"


@pytest.mark.parametrize(
    "names",
    [
        [*HUB, HUB_TEST],
        ["train.jsonl", "test.jsonl"],
        ["d/hh_train.jsonl", "d/hh_test.jsonl"],
        ["d/Train.csv", "d/validation.csv"],
        ["d/val.csv", "d/test.csv"],
        ["d/train_prefs-00000-of-00001.parquet", "d/test_prefs-00000-of-00001.parquet"],
        ["d/train/0.parquet", "d/test/0.parquet"],
        ["d/train/data-00000-of-00001.arrow", "d/test/data-00000-of-00001.arrow"],
        ["d/train/train.parquet", "d/test/test.parquet"],
        ["test/train.parquet", "test/test.parquet"],
    ],
)
def test_splits_of_one_data_set_are_refused(names):
    assert refusal(*names)
    assert refusal(*reversed(names))


@pytest.mark.parametrize(
    "names",
    [
        [*HUB, "both/test-00000-of-00001.parquet"],  # a link, on purpose
        ["d/train.jsonl", "d/more.jsonl"],
        ["d/train_prefs.jsonl", "d/train_sft.jsonl"],
        ["d/train.jsonl", "e/test.jsonl"],
        ["d/train.jsonl", "d/unit_test_questions.jsonl"],
        ["d/latest.jsonl", "d/trainer.jsonl"],
        ["d/hh_train.jsonl", "d/shp_test.jsonl"],
        ["a/train/x.jsonl", "b/test/x.jsonl"],
    ],
)
def test_other_files_are_taken_together(names):
    assert not refusal(*names)


def test_the_commands_take_the_files_of_a_split_and_no_others_into_two_folders(tmp_path):
    names = ["train-0.parquet", "train-1.parquet", "test-0.parquet", "test-1.parquet"]
    folder = tmp_path / "my data"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    said = refusal(*(str(folder / name) for name in names))
    train, test = [shlex.split(line) for line in said.splitlines() if line.startswith("  align")]
    for command, wanted in ((train, names[:2]), (test, names[2:])):
        assert command[:2] == ["align", "precompute-ref"]
        assert sorted(path.name for path in folder.glob(Path(command[2]).name)) == wanted
    assert (train[3:], test[3:]) == ([], ["--output", "cache-test"])
    said = refusal("my d/train/0.parquet", "my d/train/1.parquet", "my d/test/0.parquet")
    train, test = [shlex.split(line) for line in said.splitlines() if line.startswith("  align")]
    assert (train[2:3], test[2]) == (["my d/train"], "my d/test/0.parquet")


def test_files_of_a_store_are_known_by_where_they_were_copied_from():
    names = []
    for split in ("train", "test"):
        folder = place().folders / split[::-1]
        folder.mkdir(parents=True)
        (folder / ORIGIN).write_text(f"s3://b/data/{split}-0.jsonl")
        names.append(str(folder / f"{split}-0.jsonl"))
    assert "\n  align precompute-ref s3://b/data/test-0.jsonl --output" in refusal(*names)
