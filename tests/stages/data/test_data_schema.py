"""The shape of a file is told from its columns; files of two shapes or splits are not joined."""

import shlex
from pathlib import Path

import pytest

from align.schemas.errors import UsageError
from align.stages.data.data_schema import common_shape, detect_shape
from align.stages.data.data_splits import require_one_split
from align.stages.data.input_files import InputFile, open_inputs
from align.stages.storage.local_copies import ORIGIN, place
from support.read_rows import write_rows


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
        ("a b", {}, (), r"--map chosen=YOURS"),
        ("question chosen rejected", {}, (), r"no column 'prompt' but one named 'question'"),
        ("chosen rejected role", {}, ("role",), r"'role' cannot be carried"),
        ("prompt_id completion score", {}, (), r"--map prompt=prompt_id"),
        ("prompt chosen rejected completions scores", {}, (), r"paired and scored.*--map "),
        ("prompt completion label score", {}, (), r"unpaired with --map score=, or scored_l"),
        ("chosen rejected", {"questoin": "prompt"}, (), r"no column 'questoin' to rename"),
        ("q prompt chosen rejected", {"q": "prompt"}, (), r"'q' and 'prompt' would both be"),
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
        ["d/val.csv", "d/test.csv"],
        ["d/train_prefs-00000-of-00001.parquet", "d/test_prefs-00000-of-00001.parquet"],
        ["d/train/data-00000-of-00001.arrow", "d/test/data-00000-of-00001.arrow"],
        ["d/train/train.parquet", "d/test/test.parquet"],
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
        ["a/train/x.jsonl", "b/test/x.jsonl"],
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
        folder = place().folders / split[::-1]
        folder.mkdir(parents=True)
        (folder / ORIGIN).write_text(f"s3://b/data/{split}-0.jsonl")
        names.append(str(folder / f"{split}-0.jsonl"))
    assert "\n  align precompute-ref s3://b/data/test-0.jsonl --output" in refusal_of(*names)
