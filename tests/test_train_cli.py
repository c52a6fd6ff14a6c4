"""The commands around training: the list of methods, and telling MLflow later."""

import json
from pathlib import Path

import pytest

from align.stages.methods.method_docs import plain_table, render_method, render_table
from align.stages.methods.table import METHODS
from support.command import align, refusal
from support.tracked_training import journalled, run_of, stored


def test_methods_are_listed_with_their_formulas():
    answer = align("methods")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == render_table(list(METHODS.values()))
    for name in METHODS:
        assert f"\n  {name}" in answer.out


def test_one_method_is_explained():
    answer = align("methods", "simpo")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == render_method(METHODS["simpo"])
    assert "arxiv.org" in answer.out
    said = refusal(2, "methods", "simp")
    assert "method 'simp': no such method. Did you mean 'simpo'" in said


def test_methods_are_told_to_programs_too():
    told = json.loads(align("methods", "--json").out)
    assert [method["name"] for method in told] == list(METHODS)
    (kto,) = json.loads(align("methods", "kto", "--json").out)
    assert kto["needs"] == ["reference", "mismatched"]
    assert json.loads(json.dumps(plain_table([METHODS["kto"]]))) == [kto]


@pytest.mark.filterwarnings("ignore")  # of MLflow, which runs in this process here
def test_a_store_is_told_all_of_a_run_that_it_missed_and_nothing_twice(course, tmp_path):
    """It cannot be made while the folder it is to lie in is a file."""
    run, place = tmp_path / "run", tmp_path / "store"
    place.touch()
    uri = f"sqlite:///{place / 'mlflow.db'}"
    answer = course.run(run, "--mlflow", "--set", f"tracking.uri={uri}", "--max-steps", 2)
    assert f"`align mlflow-sync {run}`" in answer.err
    assert f"pass --uri {uri}" in refusal(2, "mlflow-sync", run)
    assert "failed" in refusal(74, "mlflow-sync", run, "--uri", uri)
    place.unlink()
    place.mkdir()
    first = align("mlflow-sync", run, "--uri", uri)
    assert first.code == 0, first
    run_id = json.loads((run / "_align" / "mlflow.json").read_text())["run_id"]
    assert first.out.splitlines()[0] == f"{uri}: run {run_id} is FINISHED"
    assert first.out.splitlines()[1] == f"{len(journalled(run))} numbers sent"
    assert "0 numbers sent" in align("mlflow-sync", run, "--uri", uri).out
    assert stored(uri, run_id) == journalled(run)
    assert run_of(uri, run_id).info.status == "FINISHED"


def test_a_folder_without_a_run_has_nothing_to_tell(tmp_path):
    said = refusal(2, "mlflow-sync", tmp_path)
    assert str(tmp_path) in said
    assert not list(Path(tmp_path).iterdir())
