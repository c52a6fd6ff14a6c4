"""What every command owes a person before it does anything."""

import json
import subprocess
import sys

import pytest
import typer

from align import cli
from align.stages.methods.method_docs import render_method, render_table
from align.stages.methods.table import METHODS
from support.command import align, refusal
from support.tracked_training import journalled, run_of, stored

COMMANDS = typer.main.get_command(cli.app).commands
HEAVY = {"deepspeed", "mlflow", "numpy", "polars", "pyarrow", "torch", "transformers"}
ASKED = """
import sys
import align
align.train, align.load_cache, align.load_run, align.precompute
from align import cli
for words in (["--help"], ["config"], ["init"]):
    sys.argv = ["align", *words]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code
print(*sys.modules)
"""


def test_every_command_and_option_is_explained():
    for name, command in COMMANDS.items():
        answer = align(name, "--help")
        assert answer.code == 0
        assert command.help.splitlines()[0] in " ".join(answer.out.split())
        assert not [option.name for option in command.params if not option.help]


def test_what_computes_nothing_imports_no_heavy_package(tmp_path):
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    *_, imported = done.stdout.splitlines()
    assert "align.cli" in imported.split()
    assert not HEAVY & {*imported.split()}


def test_what_is_no_command_or_option_is_a_usage_error():
    for words in (["nonsense"], ["precompute-ref", "--nonsense"], ["inspect"], ["--nonsense"]):
        answer = align(*words)
        assert answer.code == 2
        assert "Error" in answer.err
        assert "Traceback" not in answer.err


def test_methods_are_listed_with_their_formulas_and_explained_one_by_one():
    answer = align("--local_rank=0", "methods")  # as the DeepSpeed launcher adds it
    assert (answer.code, answer.out) == (0, render_table([*METHODS.values()]))
    assert align("methods", "simpo").out == render_method(METHODS["simpo"])
    assert [one["name"] for one in json.loads(align("methods", "--json").out)] == [*METHODS]
    assert "'simp': no such method. Did you mean 'simpo'" in refusal(2, "methods", "simp")


@pytest.mark.filterwarnings("ignore")  # of MLflow, which runs in this process here
def test_a_store_is_told_all_of_a_run_that_it_missed_and_nothing_twice(course, tmp_path):
    """It cannot be made while the folder it is to lie in is a file."""
    run, place = tmp_path / "run", tmp_path / "store"
    place.touch()
    uri = f"sqlite:///{place / 'mlflow.db'}"
    answer = course.run(run, "--mlflow", "--set", f"tracking.uri={uri}", "--max-steps", 2)
    assert f"`align mlflow-sync {run}`" in answer.err
    assert "plan: 2 steps of" in answer.err
    assert f"pass --uri {uri}" in refusal(2, "mlflow-sync", run)
    assert "failed" in refusal(74, "mlflow-sync", run, "--uri", uri)
    place.unlink()
    place.mkdir()
    first = align("mlflow-sync", run, "--uri", uri)
    assert first.code == 0, first
    run_id = json.loads((run / "_align" / "mlflow.json").read_text())["run_id"]
    assert f"run {run_id} is FINISHED" in first.out
    assert f"{len(journalled(run))} numbers sent" in first.out
    assert "0 numbers sent" in align("mlflow-sync", run, "--uri", uri).out
    assert stored(uri, run_id) == journalled(run)
    assert run_of(uri, run_id).info.status == "FINISHED"

    # The speed of the next run is planned from it.
    words = ("plan", "--method", "dpo", "--cache", course.cache, "--like", run)
    assert "without evaluations" in align(*words).out


def test_a_dry_run_is_the_plan_of_all_that_a_training_needs_and_makes_nothing(
    course, tmp_path, monkeypatch
):
    words = ("--method", "dpo", "--cache", course.cache, "--output", tmp_path / "run")
    plan, dry = align("plan", *words), align("train", *words, "--dry-run")
    assert (dry.code, dry.out) == (0, plan.out)
    priced = ("--tokens-per-second", 100, "--price", 3)
    gpus = align("plan", *words, *("--gpu", "24g", "--gpus", 2), *priced)
    for said in ("steps", "KL pairs", "zero3-offload, lora", "> zero1", "Fits: ", "at 3.00"):
        assert said in gpus.out
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a launcher starts it
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        answer = align("train", *words, "--dry-run")
        assert answer.code == 0, answer
        assert ("2 ranks" in answer.out, answer.out == "") == (rank == "0", rank == "1")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_planned_is_refused(course, tmp_path):
    words = ("plan", "--method", "dpo", "--cache", course.cache)
    assert "--gpu big: expected a size" in refusal(2, *words, "--gpu", "big")
    both = ("--tokens-per-second", 5, "--like", tmp_path)
    assert "Leave out one of them" in refusal(2, *words, *both)
    assert "metrics.jsonl" in refusal(2, *words, "--like", tmp_path)
    assert "No method" in refusal(2, "plan", "--rows", 5)
    assert "No policy" in refusal(2, "plan", "--method", "dpo", "--rows", 5)
