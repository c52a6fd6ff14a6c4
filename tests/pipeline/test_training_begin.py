"""How a run begins: whose settings it takes, and what it makes of a folder begun before."""

import json
import re

import pyarrow.parquet as pq
import pytest

from support.command import align, refusal

pytestmark = pytest.mark.usefixtures("here")

ONE_STEP = ("--method", "dpo", "--max-steps", 1, "--batch-size", 4, "--no-mlflow")


def config_of(run):
    return (run / "config.yaml").read_text()


def test_a_file_beside_the_cache_is_read(course, here):
    project = here / "project"
    project.mkdir()
    (project / "cache").symlink_to(course.cache)
    (project / "align.yaml").write_text("train:\n  lr: 0.125\n")
    answer = align("train", "--cache", project / "cache", "--output", "run", *ONE_STEP)
    assert answer.code == 0, answer
    assert "lr: 0.125" in config_of(here / "run")


def test_the_path_of_a_deepspeed_file_is_relative_to_where_it_is_written(course, here):
    project = here / "project"
    project.mkdir()
    (project / "stage.json").write_text(json.dumps({"zero_optimization": {"stage": 5}}))
    (here / "stage.json").write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    (project / "align.yaml").write_text("train:\n  deepspeed: stage.json\n")
    words = ("--cache", course.cache, "--config", project / "align.yaml")
    assert "stage is 5" in refusal(2, "train", *words, *ONE_STEP)


def test_a_run_that_failed_before_it_began_blocks_no_other(course, here):
    words = ("--cache", course.cache, "--output", "run", *ONE_STEP)
    wrong = ("--lora", "--set", "lora.targets=[nosuch]")
    assert "nosuch" in refusal(2, "train", *words, *wrong)
    answer = align("train", *words)
    assert answer.code == 0, answer


def test_a_finished_adapter_can_be_merged_later(course, here):
    words = ("--cache", course.cache, "--output", here / "run", *ONE_STEP, "--lora")
    first = course.server.run("train", *words)
    assert first.code == 0, first
    before = (here / "run" / "model" / "adapter_model.safetensors").read_bytes()
    again = course.server.run("train", *words, "--merge", "--resume", "auto")
    assert again.code == 0, again
    assert (here / "run" / "model-merged" / "config.json").is_file()
    assert (here / "run" / "model" / "adapter_model.safetensors").read_bytes() == before


def test_the_rank_of_the_deepspeed_launcher_is_not_read_as_an_option():
    assert align("--local_rank=0", "methods", "dpo").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--merge",), "lora.merge is set, but no adapter is trained"),
        (("--set", "lora.rank=4"), "lora.rank is set, but no adapter is trained"),
        (("--lora", "--set", "lora.dropout=0.3"), "train.dropout is off"),
        (("--schedule", "constant", "--set", "train.min_lr=0.1"), "a constant schedule never"),
    ],
)
def test_a_setting_without_effect_is_refused(course, words, said):
    assert said in refusal(2, "train", "--cache", course.cache, *ONE_STEP, *words)


def test_a_default_that_init_wrote_does_not_count_as_given(course, world, here):
    assert align("init").code == 0
    made = ("--model", world.model, "--output", "short", "--max-length", 256, "--no-mlflow")
    assert align("precompute-ref", world.data.paired, *made).code == 0
    answer = align("train", "--cache", "short", "--output", "run", *ONE_STEP)
    assert answer.code == 0, answer
    said = refusal(4, "train", "--cache", "short", *ONE_STEP, "--set", "tokens.max_length=2048")
    assert "tokens.max_length: the cache has 256, now 2048" in said


def test_a_run_resumes_under_the_deepspeed_configuration_it_began_with(course, here):
    file = here / "engine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    words = ("--cache", course.cache, "--output", "run", *ONE_STEP, "--deepspeed", file)
    assert align("train", *words).code == 0
    more = (*words, "--max-steps", 2, "--resume", "auto")
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "prescale_gradients": True}))
    said = refusal(4, "train", *more)
    assert "deepspeed prescale_gradients: begun with nothing, now True" in said
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert align("train", *more).code == 0


def test_the_split_says_what_it_ignores_and_counts_what_is_nearly_learned_from(course):
    words = ("--cache", course.cache, "--eval-fraction", 0.4, "--output", "run", *ONE_STEP)
    answer = align("train", *words)
    assert answer.code == 0, answer
    assert "held out by a hash that ignores white space, the system message, tools" in answer.err
    (count,) = re.findall(r"\b(\d+) of \d+ held-out prompts are nearly the same", answer.err)
    assert int(count) > 0


def test_prompts_on_both_sides_are_reported(course, world):
    prompts = set(pq.read_table(world.data.paired)["prompt"].to_pylist())
    words = ("--cache", course.cache, "--set", f"train.eval_cache={course.cache}")
    answer = align("train", *words, "--output", "run", *ONE_STEP)
    assert answer.code == 0, answer
    assert f"{len(prompts)} of {len(prompts)} prompts of {course.cache} are in the tr" in answer.err
