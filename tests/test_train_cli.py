"""The commands around training: the list of methods, and telling MLflow later."""

import json

import pytest

from align.stages.methods.method_docs import plain_table, render_method, render_table
from align.stages.methods.table import METHODS
from support.command import align, refusal
from support.tracked_training import journalled, run_of, stored


def test_methods_are_listed_with_their_formulas_and_explained_one_by_one():
    """The texts themselves are read in stages/methods/test_method_docs.py."""
    every, one = [*METHODS.values()], METHODS["simpo"]
    for words, shown in (
        ((), render_table(every)),
        (("simpo",), render_method(one)),
        (("--json",), plain_table(every)),
        (("simpo", "--json"), plain_table([one])),
    ):
        answer = align("methods", *words)
        assert (answer.code, answer.err) == (0, "")
        told = json.loads(answer.out) if "--json" in words else answer.out
        assert told == (json.loads(json.dumps(shown)) if "--json" in words else shown)
    assert "'simp': no such method. Did you mean 'simpo'" in refusal(2, "methods", "simp")


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
    assert str(tmp_path) in refusal(2, "mlflow-sync", tmp_path)
    assert not list(tmp_path.iterdir())
