"""A run's name tells it from others, and no name of a file steers who reads it."""

import pytest

from align.schemas.safe_text import mask_secret
from align.stages.tracking.run_texts import (
    data_name,
    description,
    model_name,
    quoted,
    run_name,
)


def test_a_name_is_of_model_method_and_data():
    assert run_name("/models/qwen2.5-0.5b/", "kto", "prefs") == "qwen2.5-0.5b · kto · prefs"
    assert run_name("", "sweep", "") == "sweep"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/align-run/model", "align-run"),
        ("rounds/round-0001/run/merged", "round-0001"),
        ("model", "model"),
        ("s3://user:pw@bucket/llama?token=abcdef", "llama"),
        (f"/hub/models--Qwen--Qwen2.5-0.5B/snapshots/{'0a' * 20}", "Qwen2.5-0.5B"),
        ("../..", ""),
        ("/", ""),
        ("a\n\tb", "a b"),
        ("a\x1b[2Jb", "a\\u001b[2Jb"),
        ("x\udcff", "x\\udcff"),
    ],
)
def test_a_model_is_called_what_tells_it_from_others(path, name):
    assert model_name(path) == name


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["/data/prefs.jsonl"], "prefs"),
        (["prefs.v1.2.JSON.gz", "b.csv", "c"], "prefs.v1.2 +2"),
        (["/data/prefs/"], "prefs"),
        ([".jsonl"], ".jsonl"),
        ([], ""),
    ],
)
def test_data_are_called_what_their_first_file_is(files, name):
    assert data_name(files) == name


def test_a_name_is_short_and_no_end_of_it_is_a_secret():
    mask_secret("correct-horse-battery")
    long = run_name("m" * 999, "k" * 999, data_name(["d" * 999 + ".jsonl"]))
    assert [len(part) for part in long.split(" · ")] == [40, 40, 40]
    whole = run_name("m" * 30 + "correct-horse-battery", "kto", "")
    assert "correct" not in whole
    assert "correct" not in description("", {"run": "/a/correct-horse-battery"})


def test_no_half_of_a_secret_is_a_name():
    """It holds a slash, and ends as a data file does."""
    mask_secret("correct/horse-battery.csv")
    assert model_name("/a/correct/horse-battery.csv") == "***"
    assert data_name(["/a/correct/horse-battery.csv"]) == "***"


def test_what_is_quoted_is_no_markup():
    assert quoted("# <b>*x*") == "`# <b>*x*`"
    assert quoted("a`b``c\n- d") == "``` a`b``c - d ```"
    text = description("All.", {"run": "/a\n\n# b", "none": "", "lr": 0.1})
    assert text.split("\n") == ["All.", "", "- run: `/a # b`", "- lr: `0.1`"]
