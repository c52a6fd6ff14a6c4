"""A flag or --set that a command does not use is refused, with what serves in its place."""

import json
import shutil
import sys

import pytest
from typer.main import get_command

from align import cli
from align.pipeline.commands.settings_command import SettingsCommand
from align.pipeline.options.settings import flatten, load_settings
from align.pipeline.options.table import (
    COMMANDS,
    FLAGS,
    READS,
    SETS,
    TAKES,
    WORDS,
    bound,
    reads,
)
from align.pipeline.train.setup import check
from align.schemas.config import Config
from align.schemas.errors import UsageError
from align.stages.tracking.tracker import TRACKERS, kind_of
from support.command import align, refusal
from support.refusals import refuses

pytestmark = pytest.mark.usefixtures("here")

SETTINGS = [*flatten(Config()), "method.beta"]
SETTING_COMMANDS = ("precompute-ref", "score", "train", "sweep", "verify")
VALUES = {bool: "true", int: "3", float: "0.5", list: "[a]", dict: "{a: b}"}


def test_commands_that_take_settings_are_those_of_the_table():
    commands = get_command(cli.app).commands.items()
    taking = {name for name, command in commands if isinstance(command, SettingsCommand)}
    assert {*COMMANDS} == taking


def test_every_name_of_the_table_is_a_setting_or_a_section():
    sections = {name.partition(".")[0] for name in SETTINGS}
    named = {f"{section}.{key}" for section, keys in FLAGS.items() for key in keys.split()}
    for names in (*TAKES.values(), *READS.values()):
        named |= {*names.split()}
    named |= {*WORDS, *SETS["sweep"], *SETS["rounds"], *SETS["rounds"].values()} - {""}
    assert not named - {*SETTINGS} - sections


def test_a_mapping_says_the_same_in_any_order():
    weights = ({"a": 2.0, "b": 0.5}, {"b": 0.5, "a": 2.0})
    first, second = (
        bound(flatten(Config()) | {"train.file_weights": one}, "run") for one in weights
    )
    assert first == second
    assert "train.file_weights" in first


def test_a_set_is_used_or_refused_by_name():
    for name in SETTINGS:
        assert any(reads(command, name) for command in READS) or name.startswith("rounds.")
        text = f"{name}={value_of(name)}"
        for command in SETTING_COMMANDS:
            if reads(command, name):
                load_settings({}, [text], file=None, command=command)
                continue
            with refuses(UsageError, f"--set: {name} ", f"`align {command}`"):
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


def opened(cache, **flags):
    given = {"train.method": "dpo", "train.cache": str(cache), **flags}
    return check(load_settings(given, [], file=None, command="train"))


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
        words = ("train", "--method", "dpo", "--cache", journey.cache)
        refusal(4, *words, names=(source, "model.path", other, "train.other_reference=true"))
    policy = {"train.model": str(other), "train.other_reference": True}
    assert opened(journey.cache, **policy).begins_as.path == str(other)
    # The cache's model by any of its names.
    (here / "link").symlink_to(world.model)
    shutil.copytree(world.model, here / "copy")
    for name in ("link", "copy", str(world.model)):
        monkeypatch.setenv("ALIGN_MODEL", name)
        assert opened(journey.cache).begins_as.path == str(world.model)


def test_a_library_that_is_missing_is_named_before_data_or_a_model_is_looked_at(
    here, journey, monkeypatch
):
    data, train = ("nowhere.jsonl", "--model", "nowhere"), ("train", "--method", "dpo")
    own = [name for name in TRACKERS if kind_of(name).library]
    for library in ("ray", "peft", *(kind_of(name).library for name in own)):
        monkeypatch.setitem(sys.modules, library, None)
    for words, name in (
        (("precompute-ref", *data, "--set", "scoring.executor=ray"), "Ray"),
        (("score", "x.jsonl", "--reward-model", "x", "--set", "scoring.executor=ray"), "Ray"),
        (("sample", *data, "--adapter", "nowhere"), "pip install peft"),
        ((*train, "--cache", journey.cache, "--lora"), "pip install peft"),
        *(
            ((*train, "--cache", "nowhere", "--track", f"mlflow,{one}"), f"reference[{one}]")
            for one in own
        ),
    ):
        refusal(2, *words, names=(name,))
    assert [*here.iterdir()] == []


def test_options_of_methods_are_shown():
    shown = align("config", "--set", "method.dpo.beta=0.2", "--set", "method.std=none").out
    assert "method.dpo.beta = 0.2" in shown
