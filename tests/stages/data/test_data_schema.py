"""The shape of a file is told from its columns, or refused with what to do."""

import pytest

from align.schemas.errors import UsageError
from align.stages.data.data_schema import common_shape, detect_shape
from align.stages.data.input_files import open_inputs
from support.read_rows import write_rows


def detect(columns, rename=None, carry=()):
    return detect_shape(columns.split(), rename or {}, carry, where="a.csv")


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ("chosen rejected", "paired"),
        ("prompt chosen rejected id", "paired"),
        ("prompt completion label", "unpaired"),
        ("prompt completions scores", "scored"),
        ("prompt completion score", "scored_long"),
        ("prompt_id prompt completion score", "scored_long"),
    ],
)
def test_the_columns_decide_the_shape(columns, kind):
    shape = detect(columns)
    assert shape.kind == kind
    assert shape.has_prompt == ("prompt" in columns.split())


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
        ("promt completions scores", {}, (), r"--map prompt=promt"),
        ("a b", {}, (), r"--map chosen=YOURS"),
        ("question chosen rejected", {}, (), r"no column 'prompt' but one named 'question'"),
        ("chosen rejected role", {}, ("role",), r"'role' cannot be carried"),
        ("prompt_id completion score", {}, (), r"--map prompt=prompt_id"),
        ("prompt chosen rejected completions scores", {}, (), r"paired and scored.*--map "),
        ("prompt completion label score", {}, (), r"unpaired with --map score=, or scored_l"),
        ("chosen rejected", {"questoin": "prompt"}, (), r"no column 'questoin' to rename"),
        ("chosen rejected question", {"questoin": "prompt"}, (), r"Did you mean 'question'\?"),
        ("q prompt chosen rejected", {"q": "prompt"}, (), r"'q' and 'prompt' would both be"),
        ("chosen rejected margn", {}, ("margin",), r"no column 'margin' to carry.*'margn'\?"),
        ("chosen rejected chosen", {}, (), r"2 columns named 'chosen'"),
    ],
)
def test_what_fits_no_shape_or_several_is_refused_with_the_way_out(columns, rename, carry, message):
    with pytest.raises(UsageError, match=message) as caught:
        detect(columns, rename, carry)
    assert "a.csv" in str(caught.value)


def test_the_way_out_of_several_shapes_works():
    columns = "prompt chosen rejected completions scores completion label"
    with pytest.raises(UsageError) as caught:
        detect(columns)
    way = str(caught.value).split("Choose ")[1].split(", or ")[0]  # paired with --map x= ...
    dropped = [word.rstrip("=") for word in way.split() if word.endswith("=")]
    assert detect(columns, {name: f"unused {name}" for name in dropped}).kind == "paired"


PAIR = {"chosen": "c", "rejected": "r"}


def shape_of_files(folder, *files):
    paths = [write_rows(folder / f"{number}.jsonl", rows) for number, rows in enumerate(files)]
    return common_shape(open_inputs(paths), {})


def test_the_shape_of_files_is_the_union_of_their_first_rows(tmp_path):
    shape = shape_of_files(tmp_path, [PAIR, PAIR | {"tools": []}], [PAIR | {"system": "s"}])
    assert (shape.kind, set(shape.optional)) == ("paired", {"tools", "system"})


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (PAIR, {"prompt": "p", "completion": "c", "label": True}),
        (PAIR, {"prompt": "p"} | PAIR),
        (PAIR, PAIR | {"margin": 1}),
        (PAIR | {"score_chosen": 1}, PAIR | {"chosen_score": 1}),
    ],
)
def test_files_of_two_shapes_are_refused_by_name(tmp_path, first, other):
    with pytest.raises(UsageError, match=r"0\.jsonl and .*1\.jsonl hold different data"):
        shape_of_files(tmp_path, [first], [other])
