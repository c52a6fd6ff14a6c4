"""How a run begins: whose settings it takes, and what it makes of a folder begun before."""

import json
import re

import pyarrow.parquet as pq
import pytest

from support.command import align, refusal

pytestmark = pytest.mark.usefixtures("here")

ONE_STEP = ("--method", "dpo", "--max-steps", 1, "--batch-size", 4, "--no-mlflow")


def test_a_run_takes_the_file_beside_its_cache_and_a_folder_where_one_failed_to_begin(course, here):
    project = here / "project"
    project.mkdir()
    (project / "cache").symlink_to(course.cache)
    (project / "align.yaml").write_text("train:\n  lr: 0.125\n  eval_fraction: 0.4\n")
    words = ("train", "--cache", project / "cache", "--output", "run", *ONE_STEP)
    assert "nosuch" in refusal(2, *words, "--lora", "--set", "lora.targets=[nosuch]")
    answer = align(*words)
    assert answer.code == 0, answer
    assert "lr: 0.125" in (here / "run" / "config.yaml").read_text()
    assert "held out by a hash that ignores white space, the system message, tools" in answer.err
    (count,) = re.findall(r"\b(\d+) of \d+ held-out prompts are nearly the same", answer.err)
    assert int(count) > 0


def test_a_finished_adapter_can_be_merged_later(course, here):
    words = ("--cache", course.cache, "--output", here / "run", *ONE_STEP, "--lora")
    first = course.server.run("train", *words)
    assert first.code == 0, first
    before = (here / "run" / "model" / "adapter_model.safetensors").read_bytes()
    again = course.server.run("train", *words, "--merge", "--resume", "auto")
    assert again.code == 0, again
    assert (here / "run" / "model-merged" / "config.json").is_file()
    assert (here / "run" / "model" / "adapter_model.safetensors").read_bytes() == before


def test_a_default_that_init_wrote_does_not_count_as_given(course, world, here):
    assert align("init").code == 0
    made = ("--model", world.model, "--output", "short", "--max-length", 256, "--no-mlflow")
    assert align("precompute-ref", world.data.paired, *made).code == 0
    answer = align("train", "--cache", "short", "--output", "run", *ONE_STEP)
    assert answer.code == 0, answer
    said = refusal(4, "train", "--cache", "short", *ONE_STEP, "--set", "tokens.max_length=2048")
    assert "tokens.max_length: the cache has 256, now 2048" in said


def test_a_run_resumes_under_the_deepspeed_configuration_it_began_with(course, world, here):
    """It is evaluated on the rows that it learns from, which is said."""
    file = here / "engine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    words = ("--cache", course.cache, "--output", "run", *ONE_STEP, "--deepspeed", file)
    words = (*words, "--set", f"train.eval_cache={course.cache}")
    begun = align("train", *words)
    assert begun.code == 0, begun
    prompts = len(set(pq.read_table(world.data.paired)["prompt"].to_pylist()))
    assert f"{prompts} of {prompts} prompts of {course.cache} are in the tr" in begun.err
    more = (*words, "--max-steps", 2, "--resume", "auto")
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "prescale_gradients": True}))
    said = refusal(4, "train", *more)
    assert "deepspeed prescale_gradients: begun with nothing, now True" in said
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert align("train", *more).code == 0
