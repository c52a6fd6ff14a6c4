"""What every command owes a person, and the way of one who has a data file and an align.yaml."""

import json
import re
import shlex
import shutil
import sys

import pyarrow.parquet as pq
import pytest
import typer

from align import __version__, cli
from align.stages.methods.method_docs import render_method, render_table
from align.stages.methods.table import METHODS
from align.stages.storage.run.run_folder import RunFolder
from support.command import align, refusal, said_by, success
from support.mlflow_runs import id_on_disk, run_of, stored
from support.stage_one import contents
from support.tracked_training import logged_numbers


def test_no_flag_is_needed_and_only_cache_and_store_are_written(journey):
    assert journey.answer.code == 0, journey.answer
    assert "60 rows, 240 completions" in journey.answer.out
    _, follows = journey.answer.out.split("next: align ")  # the command that comes next, as it is
    name, *words = shlex.split(follows)
    with COMMANDS[name].make_context(name, words) as context:
        assert context.params["train.cache"] == str(journey.cache)
    said = journey.answer.out + journey.answer.err
    assert said.replace("\n", "").isprintable()  # as a log wants it
    assert {path.name for path in journey.cache.iterdir()} == {"manifest.json", "data", "_align"}
    assert {path.name for path in journey.cwd.iterdir()} <= {"home", "mlflow.db", "mlruns"}
    names = {path.name for path in journey.folder.iterdir()} - {"cache-trl.parquet"}
    assert names == {"align.yaml", "data.parquet", "cache"}
    rows = pq.read_table(journey.cache / "data").to_pylist()
    assert sorted(row["source"]["row"] for row in rows) == list(range(60))
    for row in rows:
        assert row["role"] == [0, 1, 5, 5]
        assert row["num_tokens"] == [len(ids) for ids in row["completion_ids"]]
        assert all(logp < 0 for logp in row["ref_logp"])
    before = contents(journey.cache)
    again = align("precompute-ref", journey.folder / "data.parquet", "--no-mlflow")
    assert (again.code, again.err) == (0, ""), again
    assert contents(journey.cache) == before
    # Both people and programs are shown it.
    assert "mismatched" in align("inspect", journey.cache).out
    summary = json.loads(align("inspect", journey.cache, "--json").out)
    assert (summary["rows"], summary["branches"], summary["shards"]) == (60, 240, 8)
    assert set(summary["roles"]) == {"chosen", "rejected", "mismatched"}


def test_verify_scores_a_sample_again(journey, world, tmp_path):
    answer = success("verify", journey.cache)
    assert "64 " in answer.out  # 16 rows of 4
    assert "240 " in align("verify", journey.cache, "--rescore", "60").out
    assert "scored" not in align("verify", journey.cache, "--rescore", "0").out
    other = shutil.copytree(world.model, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    refusal(4, "verify", journey.cache, "--model", other, names=("model.weights",))
    again = ("precompute-ref", journey.folder / "data.parquet", "--output", journey.cache)
    names = (world.model, other, "model.weights")
    refusal(4, *again, "--model", other, "--no-mlflow", names=names)


def test_export_writes_what_trl_reads(journey):
    answer = success("export", journey.cache, "--to", "trl")
    target = journey.folder / "cache-trl.parquet"
    assert str(target) in answer.out
    assert {"prompt", "ref_chosen_logps", "ref_rejected_logps"} <= {*pq.read_schema(target).names}
    tables = [pq.read_table(path) for path in (target, journey.folder / "data.parquet")]
    for name in ("chosen", "rejected"):
        written, given = ({one.strip() for one in each[name].to_pylist()} for each in tables)
        assert written == given
    refusal(2, "export", journey.cache, names=(target,))
    success("export", journey.cache, "--overwrite")


COMMANDS = typer.main.get_command(cli.app).commands
HEAVY = {"deepspeed", "mlflow", "numpy", "polars", "pyarrow", "torch", "transformers"}
ASKED = """
import sys
import align
align.train, align.load_cache, align.load_run, align.precompute
from align import cli
for words in {words}:
    sys.argv = ["align", *words]
    try:
        cli.main()
    except SystemExit as end:
        assert (end.code or 0) == {code}
print(*sys.modules)
"""


def test_every_command_and_option_is_explained(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name, command in COMMANDS.items():
        answer = success(name, "--help")
        assert max(map(len, answer.out.splitlines())) <= 80
        with command.make_context(name, [], resilient_parsing=True) as context:
            options = command.get_params(context)  # those of methods too
        flags = [word for one in options for word in (*one.opts, *one.secondary_opts)]
        words = {*re.findall(r"[^\s,]+", answer.out)}
        assert not [flag for flag in flags if flag.startswith("-") and flag not in words], name
        assert not [option.name for option in options if not option.help]
        told = [command.help.partition("\n\n")[0], *(option.help for option in options)]
        missing = {*" ".join(told).replace(r"\[", "[").split()} - {*answer.out.split()}
        assert not missing, name
    overview = {*align("--help").out.split()}
    told = " ".join(one.help.partition("\n\n")[0] for one in COMMANDS.values())
    assert {*COMMANDS, *told.split()} <= overview


def test_the_version_and_short_help_are_where_they_are_looked_for():
    assert align("--version").out.split() == [__version__]
    assert align("-h").out == align("--help").out
    assert align("train", "-h").out == align("train", "--help").out


def imported_by(folder, *commands, code=0):
    """The modules that a process has imported once it has given these commands."""
    program = ASKED.format(words=[list(map(str, words)) for words in commands], code=code)
    done = said_by(sys.executable, "-c", program, cwd=folder)
    return {*done.splitlines()[-1].split()}


def test_light_commands_import_no_heavy_package(tmp_path):
    imported = imported_by(tmp_path, ["--help"], ["config"], ["init"])
    assert "align.cli" in imported
    assert not HEAVY & imported
    methods = imported_by(tmp_path, ["methods"], ["methods", "kto"], ["methods", "--json"])
    assert "align.stages.methods.table" in methods
    assert not HEAVY - {"numpy"} & methods  # whose columns the methods' rows are declared by


def test_mistakes_are_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    train = ["train", "--method", "kto"]
    imported = imported_by(
        tmp_path,
        ["train", "--method", "dp"],
        ["sweep", "--method", "dp"],
        ["run", "rows.jsonl", "--model", tmp_path, "--method", "dp"],
        ["run", "rows.jsonl", "--model", "nowhere", "--method", "kto"],
        [*train, "--beta", "-1"],
        [*train, "--set", "method.betta=1"],
        [*train, "--learning-rate", "1"],
        [*train, "--cache", "nowhere"],
        ["precompute-ref", "nowhere.jsonl", "--model", tmp_path],
        ["precompute-ref", "rows.jsonl", "--model", "nowhere"],
        code=2,
    )
    assert not {"torch", "transformers", "deepspeed", "mlflow"} & imported


def test_methods_are_listed_with_their_formulas_and_explained_one_by_one():
    answer = align("--local_rank=0", "methods")  # as the DeepSpeed launcher adds it
    assert (answer.code, answer.out) == (0, render_table([*METHODS.values()]))
    assert align("methods", "simpo").out == render_method(METHODS["simpo"])
    assert [one["name"] for one in json.loads(align("methods", "--json").out)] == [*METHODS]


@pytest.mark.filterwarnings("ignore")  # of MLflow, which runs in this process here
def test_mlflow_sync_sends_what_was_missed_once(course, tmp_path):
    """It cannot be made while the folder it is to lie in is a file."""
    run, place = tmp_path / "run", tmp_path / "store"
    place.touch()
    uri = f"sqlite:///{place / 'mlflow.db'}"
    answer = course.run(run, "--mlflow", "--set", f"tracking.uri={uri}", "--max-steps", 2)
    assert f"`align mlflow-sync {run}`" in answer.err
    assert "plan: 2 steps of" in answer.err
    refusal(2, "mlflow-sync", run, names=("--uri", uri))
    refusal(74, "mlflow-sync", run, "--uri", uri, names=(uri,))
    place.unlink()
    place.mkdir()
    first = success("mlflow-sync", run, "--uri", uri)
    run_id = id_on_disk(RunFolder(run))
    assert run_id in first.out
    assert "FINISHED" in first.out
    assert f"{len(logged_numbers(run))} numbers sent" in first.out
    assert "0 numbers sent" in align("mlflow-sync", run, "--uri", uri).out
    assert stored(uri, run_id) == logged_numbers(run)
    assert run_of(uri, run_id).info.status == "FINISHED"


def test_a_plan_says_all_that_a_training_needs_and_makes_nothing(course, tmp_path):
    words = ("--method", "dpo", "--cache", course.cache, "--output", tmp_path / "run")
    gpus = align("plan", *words, *("--gpu", "24g", "--gpus", 2))
    first, *lines, last = gpus.out.splitlines()
    assert first.startswith("Fits: ")
    for said in ("steps", "KL completions", "zero3-offload, lora"):
        assert any(said in line for line in lines)
    assert last.startswith("torchrun")
    assert {"train", "--method", "--cache", "--output"} <= {*last.split()}
    assert not (tmp_path / "run").exists()
