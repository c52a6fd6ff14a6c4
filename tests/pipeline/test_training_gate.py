"""A cache is learned from only where it is of the policy's text and of the reference."""

import json
import shutil
from dataclasses import replace

import pytest

from align.pipeline.settings import load_settings
from align.schemas.config import CacheOptions, ModelOptions, TrackingOptions
from align.stages.model.reference import HfReference
from support import stage_one
from support.command import refusal
from support.stub_reference import StubReference


@pytest.fixture
def policy(course, tmp_path):
    """A copy of the reference, to be changed."""
    return shutil.copytree(course.model, tmp_path / "policy")


def refused(course, *more):
    """Gives a command that the gate must refuse."""
    return refusal(4, "train", "--cache", course.cache, "--method", "dpo", "--no-mlflow", *more)


def change_weights(folder):
    """Flips the last bit of the last weight."""
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-4] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def test_another_tokenizer_is_refused(course, policy):
    tokenizer = json.loads((policy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (policy / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = refused(course, "--model", policy)
    assert f"The cache does not fit {policy} and these settings:\n  tokenizer.vocabulary:" in said
    assert "Make another cache with them, or undo the change." in said


def test_another_chat_template_is_refused(course, policy, tmp_path):
    with (policy / "chat_template.jinja").open("a") as template:
        template.write(" ")
    assert "  tokenizer.chat_template: the cache has" in refused(course, "--model", policy)
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    given = ("--set", f"tokens.chat_template={tmp_path / 'own.jinja'}")
    assert "  tokenizer.chat_template: the cache has" in refused(course, *given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tokens.max_length=64", "tokens.max_length: the cache has 2048, now 64"),
        ("tokens.eos=never", "tokens.eos: the cache has append, now never"),
        ("tokens.boundary=strict", "tokens.boundary: the cache has shift, now strict"),
        ("tokens.prompt_side=right", "tokens.prompt_side: the cache has left, now right"),
    ],
)
def test_a_token_setting_that_was_written_down_has_to_be_the_caches(course, tmp_path, given, said):
    assert said in refused(course, "--set", given)
    name, value = given.removeprefix("tokens.").split("=")
    (tmp_path / "align.yaml").write_text(f"tokens:\n  {name}: {value}\n")
    assert said in refused(course, "--config", tmp_path / "align.yaml")


def test_another_reference_is_refused_unless_it_is_asked_for(course, policy, tmp_path):
    change_weights(policy)
    said = refused(course, "--model", policy)
    assert f"another reference than {policy}:\n  model.weights: the cache has" in said
    assert "pass --set train.other_reference=true" in said
    meant = ("--model", policy, "--set", "train.other_reference=true", "--max-steps", 1)
    answer = course.run(tmp_path / "run", *meant)
    assert "not the reference of the cache: its log-probs are not compared" in answer.err
    assert "reproduces the cached log-probs" not in answer.err


def test_a_method_without_reference_takes_any_policy(course, policy, tmp_path):
    change_weights(policy)
    course.run(tmp_path / "run", "--model", policy, "--method", "orpo", "--max-steps", 1)


class Liar:
    """Claims to be the model, and scores as the stub does."""

    def __init__(self, options):
        honest = HfReference(options)
        self.identity, self.hidden_size = honest.identity, honest.hidden_size
        self.open = StubReference().open


@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_that_are_not_the_references_are_refused(course, world, tmp_path, ranks):
    """Every digest of the cache holds, and so does the identity of the reference."""
    config = load_settings({}, [], file=None, data=[str(world.data.paired)]).config
    options = ModelOptions(path=str(course.model))
    cache = CacheOptions(output=str(tmp_path / "cache"), reuse_known=False)
    quiet = TrackingOptions(mlflow=False)
    stage_one.run(replace(config, model=options, cache=cache, tracking=quiet), Liar(options))
    lying = ("--cache", tmp_path / "cache", "--deepspeed", "zero3")
    answers = course.start(tmp_path / "run", *lying, ranks=ranks).answers()
    assert [answer.code for answer in answers] == [4] * ranks, answers
    assert "the policy is the reference of this cache, yet it scores a branch" in answers[0].err
    assert "`align verify` says whether the cache is damaged" in answers[0].err
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
