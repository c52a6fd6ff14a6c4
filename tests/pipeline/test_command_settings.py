"""A flag or --set that a command does not use is refused, with what serves in its place."""

import json
import shutil
import sys

import pytest
from typer.main import get_command

from align import cli
from align.pipeline.options.declared import bound, facts_of, reads, set_by
from align.pipeline.options.settings import flatten, load_settings
from align.pipeline.train.training_job import open_training
from align.schemas.config import Config
from align.schemas.errors import UsageError
from align.schemas.option import COMMANDS
from align.stages.tracking.tracker import TRACKERS, kind_of
from support.command import align, refusal

pytestmark = pytest.mark.usefixtures("here")

SETTINGS = [*flatten(Config()), "method.beta"]
SETTING_COMMANDS = ("precompute-ref", "score", "train", "sweep", "verify")
VALUES = {bool: "true", int: "3", float: "0.5", list: "[a]", dict: "{a: b}"}


def test_commands_that_take_settings_are_those_that_declarations_name():
    taking = {
        name
        for name, command in get_command(cli.app).commands.items()
        if any(parameter.name == "sets" for parameter in command.params)
    }
    assert {*COMMANDS} == taking


def test_what_rounds_set_themselves_can_be_set_where_the_refusal_says():
    assert {*set_by("rounds").values()} <= {"", *SETTINGS}
    assert set_by("rounds").keys() <= {*SETTINGS}


def test_a_mapping_says_the_same_in_any_order():
    weights = ({"a": 2.0, "b": 0.5}, {"b": 0.5, "a": 2.0})
    first, second = (
        bound(flatten(Config()) | {"train.file_weights": one}, "run") for one in weights
    )
    assert first == second
    assert "train.file_weights" in first


def test_a_set_is_used_or_refused_by_name():
    for name in SETTINGS:
        assert facts_of(name).read_by, name
        text = f"{name}={value_of(name)}"
        for command in SETTING_COMMANDS:
            if reads(command, name):
                load_settings({}, [text], file=None, command=command)
                continue
            with pytest.raises(
                UsageError, match=rf"^--set: {name} is not used by `align {command}`"
            ):
                load_settings({}, [text], file=None, command=command)


def value_of(name):
    if name == "tracking.trackers":
        return "[mlflow]"
    if name == "train.file_weights":
        return "{a: 2}"
    default = flatten(Config()).get(name, 0.0)
    if isinstance(default, str):
        section, _, field = name.partition(".")
        return getattr(getattr(Config(), section), field) or "x"
    return VALUES[type(default)]


def test_the_refusal_says_what_serves_in_its_place():
    for command, text, way in (
        (("train", "--method", "dpo"), "model.path=other", "--model DIR (train.model)"),
        (("train", "--method", "dpo"), "data.carry=[a]", "`align precompute-ref`"),
        (("precompute-ref", "x.jsonl"), "train.lr=1", "`align train`"),
        (("score", "x.jsonl"), "model.path=other", "--reward-model DIR"),
    ):
        assert way in refusal(2, *command, "--set", text)


def opened(cache, **flags):
    given = {"train.method": "dpo", "train.cache": str(cache), **flags}
    return open_training(load_settings(given, [], file=None, command="train"))


def test_training_refuses_a_model_beside_it_that_is_not_the_caches(
    journey, world, here, monkeypatch
):
    other = shutil.copytree(world.model, here / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    (here / "align.yaml").write_text(f"model:\n  path: {other}\n")
    for source in ("align.yaml", "ALIGN_MODEL"):
        if source == "ALIGN_MODEL":
            monkeypatch.setenv("ALIGN_MODEL", str(other))
        said = refusal(4, "train", "--method", "dpo", "--cache", journey.cache)
        assert said.startswith(f"{source}: model.path is {other}")
        assert "train.other_reference=true" in said
    policy = {"train.model": str(other), "train.other_reference": True}
    assert opened(journey.cache, **policy).policy.path == str(other)
    # The cache's model by any of its names.
    (here / "link").symlink_to(world.model)
    shutil.copytree(world.model, here / "copy")
    for name in ("link", "copy", str(world.model)):
        monkeypatch.setenv("ALIGN_MODEL", name)
        assert opened(journey.cache).policy.path == str(world.model)


NOWHERE = {
    "precompute-ref": ("nowhere.jsonl", "--model", "nowhere"),
    "score": ("nowhere.jsonl", "--reward-model", "nowhere"),
    "sample": ("nowhere.jsonl", "--model", "nowhere"),
    "judge": ("nowhere", "--by", "rubric", "--model", "nowhere"),
}


def test_what_flags_or_libraries_lack_is_said_before_data_or_a_model_is_looked_at(
    here, journey, monkeypatch
):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "peft", None)
    for command, words in NOWHERE.items():
        said = refusal(2, command, *words, "--set", "scoring.executor=ray")
        on_ray = command in {"precompute-ref", "score"}
        assert ("Ray is not installed" if on_ray else "`align precompute-ref`") in said, command
    sample = ("sample", *NOWHERE["sample"])
    assert "pip install peft" in refusal(2, *sample, "--adapter", "nowhere")
    lora = ("train", "--method", "dpo", "--cache", journey.cache, "--lora")
    assert "pip install peft" in refusal(2, *lora)
    missing = ("train", "--method", "dpo", "--cache", "nowhere", "--track")
    for name in [name for name in TRACKERS if kind_of(name).library]:
        monkeypatch.setitem(sys.modules, kind_of(name).library, None)
        assert f"align-cached-reference[{name}]" in refusal(2, *missing, f"mlflow,{name}"), name
    assert "'nothing' is none of mlflow" in refusal(2, *missing, "mlflow,nothing")
    assert "Leave out one of them" in refusal(2, *missing, "mlflow", "--no-mlflow")
    for words, said in (
        (("sample", "nowhere.jsonl"), "No model to sample from"),
        (("score", *NOWHERE["score"], "--output", "no/scores"), "its parent is not a folder"),
        (("judge", "nowhere"), "--by"),
        (("judge", "nowhere", "--by", "reward"), "name the reward model"),
        (("judge", "nowhere", "--by", "rubric"), "name the language model"),
        (("judge", *NOWHERE["judge"], "--template", "no.j2"), "no.j2"),
        (("judge", *NOWHERE["judge"], "--against", "no"), "only judge.by pairwise compares"),
        (("judge", "nowhere", "--by", "regex", "--pattern", "("), "is not a regular expression"),
        (("judge", "nowhere", "--by", "function", "--function", "no:no"), "cannot be imported"),
    ):
        assert said in refusal(2, *words), words
    assert [*here.iterdir()] == []


def test_settings_with_an_option_that_no_method_has_are_refused_and_not_shown():
    for method in ([], ["--set", "train.method=kto"]):
        assert "beta" in refusal(2, "config", *method, "--set", "method.betta=1")
    shown = align("config", "--set", "method.dpo.beta=0.2", "--set", "method.std=none").out
    assert "method.dpo.beta = 0.2" in shown
