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
        HUB,
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


def test_the_commands_name_each_split_and_write_to_two_folders():
    said = refusal(*HUB, HUB_TEST)
    assert "  align precompute-ref d/train*.parquet\n" in said
    assert f"  align precompute-ref {HUB_TEST} --output cache-test\n" in said
    said = refusal("my d/train/0.parquet", "my d/train/1.parquet", "my d/test/0.parquet")
    train, test = (line for line in said.splitlines() if line.startswith("  align"))
    assert shlex.split(train) == ["align", "precompute-ref", "my d/train"]
    assert shlex.split(test)[2] == "my d/test/0.parquet"


def test_the_pattern_of_a_split_takes_its_files_and_no_others(tmp_path):
    names = ["train-0.parquet", "train-1.parquet", "test-0.parquet", "test-1.parquet"]
    for name in names:
        (tmp_path / name).touch()
    said = refusal(*(str(tmp_path / name) for name in names))
    patterns = [line.split()[2] for line in said.splitlines() if line.startswith("  align")]
    found = [sorted(path.name for path in tmp_path.glob(Path(one).name)) for one in patterns]
    assert found == [names[:2], names[2:]]


def test_a_link_in_another_folder_joins_a_split_on_purpose():
    assert not refusal(*HUB, "both/test-00000-of-00001.parquet")


def test_files_of_a_store_are_known_by_where_they_were_copied_from():
    names = []
    for split in ("train", "test"):
        folder = place().folders / split[::-1]
        folder.mkdir(parents=True)
        (folder / ORIGIN).write_text(f"s3://b/data/{split}-0.jsonl")
        names.append(str(folder / f"{split}-0.jsonl"))
    assert "\n  align precompute-ref s3://b/data/test-0.jsonl --output" in refusal(*names)
