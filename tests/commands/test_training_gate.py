"""A cache is learned from only where it is of the policy's text and of the reference."""

import json
import shutil
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from align.pipeline.options.settings import load_settings
from align.schemas.config import CacheOptions, ModelOptions, TrackingOptions
from support import stage_one
from support.command import refusal, success
from support.refusals import require_names
from support.stub_reference import Liar


@pytest.fixture
def policy(course, tmp_path):
    """A copy of the reference, to be changed."""
    return shutil.copytree(course.model, tmp_path / "policy")


def refused(course, *more, names):
    """Gives a command that the gate must refuse."""
    words = ("--cache", course.cache, "--method", "dpo", "--no-mlflow", *more)
    refusal(4, "train", *words, names=names)


def test_another_tokenizer_or_chat_template_is_refused(course, policy):
    with (policy / "chat_template.jinja").open("a") as template:
        template.write(" ")
    refused(course, "--model", policy, names=(course.model, policy, "tokenizer.chat_template: "))
    shutil.copy(course.model / "chat_template.jinja", policy)
    tokenizer = json.loads((policy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (policy / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(course, "--model", policy, names=("tokenizer.vocabulary: ",))


def test_another_reference_is_refused_unless_asked_for(course, policy, tmp_path):
    content = bytearray((policy / "model.safetensors").read_bytes())
    content[-4] ^= 1  # the last bit of the last weight
    (policy / "model.safetensors").write_bytes(content)
    named = (course.model, policy, "model.weights: ", "train.other_reference=true")
    refused(course, "--model", policy, names=named)
    meant = ("--model", policy, "--max-steps", 1)
    course.run(tmp_path / "run", *meant, "--set", "train.other_reference=true")
    course.run(tmp_path / "orpo", *meant, "--method", "orpo")


def test_a_cache_to_evaluate_on_is_of_the_same_reference_and_tokens(course, world, tmp_path):
    made = ("--model", course.model, "--output", tmp_path / "other", "--max-length", 1024)
    course.server.success("precompute-ref", world.data.paired, *made, "--no-mlflow")
    other = ("--set", f"train.eval_cache={tmp_path / 'other'}")
    refused(course, *other, names=("tokens.max_length: ",))


def test_numbers_that_are_not_the_references_are_refused_by_all_ranks(course, world, tmp_path):
    """Every digest of the cache holds, and so does the identity of the reference."""
    config = load_settings({}, [], file=None, data=[str(world.data.paired)]).config
    options = ModelOptions(path=str(course.model))
    cache = CacheOptions(output=str(tmp_path / "cache"), reuse_known=False)
    quiet = TrackingOptions(mlflow=False)
    stage_one.run(replace(config, model=options, cache=cache, tracking=quiet), Liar(options))
    lying = ("--cache", tmp_path / "cache", "--deepspeed", "zero3")
    answers = course.start(tmp_path / "run", *lying, ranks=2).answers()
    assert [answer.code for answer in answers] == [4, 4], answers
    assert "align verify" in answers[0].err
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


ONE_STEP = ("--method", "dpo", "--max-steps", 1, "--batch-size", 4, "--no-mlflow")


def test_a_run_takes_the_file_beside_its_cache(course, here):
    project = here / "project"
    project.mkdir()
    (project / "cache").symlink_to(course.cache)
    (project / "align.yaml").write_text("train:\n  lr: 0.125\n  eval_fraction: 0.4\n")
    words = ("train", "--cache", project / "cache", "--output", "run", *ONE_STEP)
    refusal(2, *words, "--lora", "--set", "lora.targets=[nosuch]", names=("nosuch",))
    success(*words)
    assert "lr: 0.125" in (here / "run" / "config.yaml").read_text()


def test_a_finished_adapter_can_be_merged_later(course, here):
    words = ("--cache", course.cache, "--output", here / "run", *ONE_STEP, "--lora")
    course.server.success("train", *words)
    before = (here / "run" / "model" / "adapter_model.safetensors").read_bytes()
    course.server.success("train", *words, "--merge", "--resume", "auto")
    assert (here / "run" / "model-merged" / "config.json").is_file()
    assert (here / "run" / "model" / "adapter_model.safetensors").read_bytes() == before


def test_a_default_that_init_wrote_does_not_count_as_given(course, world, here):
    success("init")
    made = ("--model", world.model, "--output", "short", "--max-length", 256, "--no-mlflow")
    success("precompute-ref", world.data.paired, *made)
    success("train", "--cache", "short", "--output", "run", *ONE_STEP)
    given = ("--set", "tokens.max_length=2048")
    named = ("tokens.max_length: ", "256", "2048")
    refusal(4, "train", "--cache", "short", *ONE_STEP, *given, names=named)


def test_a_run_resumes_under_the_deepspeed_configuration_it_began_with(course, world, here):
    """It is evaluated on the rows that it learns from, which is said."""
    file = here / "engine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    words = ("--cache", course.cache, "--output", "run", *ONE_STEP, "--deepspeed", file)
    words = (*words, "--set", f"train.eval_cache={course.cache}")
    begun = success("train", *words)
    prompts = len(set(pq.read_table(world.data.paired)["prompt"].to_pylist()))
    require_names(begun.err, f"{prompts} of {prompts}", course.cache)
    more = (*words, "--max-steps", 2, "--resume", "auto")
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "prescale_gradients": True}))
    refusal(4, "train", *more, names=("deepspeed prescale_gradients: ", "True"))
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    success("train", *more)
