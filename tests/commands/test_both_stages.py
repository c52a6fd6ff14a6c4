"""`align run`: both stages in one command, and what it refuses before the first."""

from contextlib import nullcontext

import pytest

from align import load_run
from align.pipeline.options.settings import load_settings
from align.pipeline.options.settings_table import flags_of
from align.pipeline.train.both_stages import settings_of_both
from align.schemas.errors import UsageError
from align.stages.model.reference import HfReference
from support import disk_faults
from support.command import refusal, success
from support.read_rows import write_rows
from support.refusals import refuses, require_names

pytestmark = pytest.mark.usefixtures("here")


def loaded_reference(_):
    raise AssertionError("the reference is loaded")


def test_one_command_makes_the_cache_and_trains(server, world, here, monkeypatch):
    cache = ("--cache", "cache", "--max-length", 512, "--reference-dtype", "float32")
    policy = ("--method", "kto", "--beta", 0.3, "--output", "run", "--no-mlflow")
    short = ("--max-steps", 1, "--batch-size", 8, "--seed", 5)
    rows = [{"prompt": f"{n}?", "chosen": f"{n} it is", "rejected": f"no {n}"} for n in range(60)]
    data, wrap = write_rows(here / "rows.jsonl", rows), ("--set", "data.wrap=chat")
    words = ("run", data, "--model", world.model, *cache, *policy, *short, *wrap)
    first = server.fork(words, here, {"ALIGN_HOME": str(here / "home")}).answer()
    assert first.code == 0, first
    require_names(first.out, "60 rows", "1 step", "run/report.html")
    following = [line for line in first.out.splitlines() if line.startswith("next: ")]
    assert following == ["next: align sample prompts.jsonl --model run/model --set data.wrap=chat"]
    run = load_run("run")
    assert run.model
    assert run.settings["tokens.max_length"] == 512
    given = {name: run.settings[name] for name in ("method.beta", "train.seed", "cache.kl_pairs")}
    assert given == {"method.beta": 0.3, "train.seed": 5, "cache.kl_pairs": 1}

    monkeypatch.setattr(HfReference, "load", loaded_reference)
    success(*words, "--set", "cache.output=cache", "--resume", "auto")
    refusal(2, *words, names=("run", "--output"))
    more = ("--output", "other", "--deepspeed", "zero33")
    refusal(2, *words, *more, names=("zero33", "'zero3'", "cache is finished"))
    assert not (here / "other").exists()


def test_a_stopped_run_reports_what_is_kept_and_resumes(server, world, here):
    """Stopped in the first stage, and again in the second."""
    small = ("--max-steps", 2, "--batch-size", 8, "--no-mlflow", "--set", "cache.shards=4")
    words = ("run", world.data.paired, "--model", world.model, "--method", "dpo", *small)

    def answer(*more, stop=""):
        home = {"ALIGN_HOME": str(here / "home"), disk_faults.VARIABLE: stop}
        return server.fork((*words, *more), here, home).answer()

    first = answer(stop="after:fsync_folder:commits=term@2")
    assert first.code == 143, first
    assert "same command" in first.err
    second = answer(stop="before:update=term")
    assert second.code == 143, second
    assert "reused " in second.out
    require_names(second.err, "step 1", "align-run/checkpoints/step-00000001", "--resume auto")
    third = answer("--resume", "auto")
    assert third.code == 0, third
    assert load_run("align-run").steps == 2


def test_both_stages_take_no_cache_of_the_settings_and_no_launcher(here, monkeypatch):
    (here / "rows.jsonl").write_text("")
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text("{}")
    words = ("run", "rows.jsonl", "--model", "model", "--method", "dpo")
    (here / "align.yaml").write_text("train:\n  cache: old\n")
    refusal(2, *words, names=("align.yaml", "train.cache", "old"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    refusal(2, *words, names=("`align precompute-ref`", "`align train`"))


def test_a_run_that_is_there_is_refused_before_the_first_stage(here):
    (here / "align-run" / "model").mkdir(parents=True)
    given = {"model.path": "base", "train.method": "dpo"}
    for resume, refused in (("never", refuses(UsageError, "align-run")), ("auto", nullcontext())):
        loaded = load_settings({**given, "train.resume": resume}, [], file=None, command="run")
        with refused:
            settings_of_both(loaded)


def test_run_has_the_flags_of_both_stages():
    flags = flags_of("run")
    either = {*flags_of("precompute-ref"), *flags_of("train")} - {"train.cache"}
    assert flags.keys() == either
    assert len({*flags.values()}) == len(flags)
    assert (flags["model.path"], flags["train.model"]) == ("--model", "--policy")


def test_a_policy_beside_the_reference_is_meant_to_be_another_model(here):
    (here / "sft").mkdir()
    given = {"model.path": "base", "train.method": "dpo", "cache.output": "made"}
    for policy, is_other in (("", False), ("sft", True)):
        loaded = load_settings({**given, "train.model": policy}, [], file=None, command="run")
        train = settings_of_both(loaded).config.train
        assert (train.cache, train.model, train.other_reference) == ("made", policy, is_other)
