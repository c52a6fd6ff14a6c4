"""What each command takes of the settings: its flags, --set, and what serves in their place."""

import json
import shutil
import sys

import pytest
import typer

from align import cli
from align.pipeline.commands.flags import SettingsCommand, takes_several
from align.pipeline.options.settings import flatten, load_settings
from align.pipeline.options.settings_table import (
    COMMANDS,
    FLAGS,
    INSTEAD,
    OURS,
    OWN_WORDS,
    reads,
)
from align.pipeline.train.setup import check
from align.schemas.config import Config
from align.schemas.errors import UsageError
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.table import METHODS
from align.stages.tracking.tracker import TRACKERS, tracker_of
from support.command import align, refusal
from support.pages import page
from support.refusals import refuses, require_names

pytestmark = pytest.mark.usefixtures("here")

GIVEN = typer.main.get_command(cli.app).commands
OPTIONS = {
    name
    for options in (Modifiers, *(method.options for method in METHODS.values()))
    for name in options.model_fields
}
SETTINGS = {*flatten(Config()), *(f"method.{name}" for name in OPTIONS)}
VALUES = {bool: "true", int: "3", float: "0.5", list: "[a]", dict: "{a: b}"}


def test_every_name_of_the_tables_is_a_setting_a_section_or_a_command():
    taking = {name for name, command in GIVEN.items() if isinstance(command, SettingsCommand)}
    assert {*COMMANDS} == taking
    assert {*INSTEAD} < taking
    named = {*OURS.values(), *(name for words in OWN_WORDS.values() for name in words)}
    for section, keys in FLAGS.items():
        named |= {f"{section}.{key.partition(':')[0]}" for key in keys.split()}
    for names in COMMANDS.values():
        named |= {*" ".join(names).split()}
    for instead in INSTEAD.values():
        named |= {*instead, *(one for one in instead.values() if "." in one and " " not in one)}
    assert not named - SETTINGS - {name.partition(".")[0] for name in SETTINGS}
    assert not {*OURS} & {name.partition(".")[2] for name in flatten(Config())}


def flags_of(command, *words):
    """The flags of a command, each as often as it is declared."""
    with GIVEN[command].make_context(command, [*words]) as context:
        return [word for one in context.command.get_params(context) for word in one.opts]


def test_options_of_methods_are_flags_of_train_plan_and_sweep():
    found = {}
    for command in ("train", "plan", "sweep"):
        found[command] = flags_of(command, "--method", "kto")
        assert len(found[command]) == len({*found[command]})
        assert {f"--{name.replace('_', '-')}" for name in OPTIONS} <= {*found[command]}
    assert {*found["train"]} <= {*found["sweep"]}
    assert not {"--beta", "--kl-use"} & {*flags_of("precompute-ref")}
    # A path may hold a comma.
    names = ("train.lr", "train.max_time", "method.beta", "train.cache", "lora.enabled")
    assert [*map(takes_several, (*names, "lora.targets"))] == [True] * 3 + [False] * 3


def test_a_set_is_used_or_refused_with_its_replacement():
    for name in flatten(Config()):
        assert [command for command in COMMANDS if reads(command, name)]
        for command in ("precompute-ref", "score", "train", "sweep", "verify", "rounds"):
            text = f"{name}={value_of(name)}"
            if reads(command, name):
                load_settings({}, [text], file=None, command=command)
                continue
            instead = INSTEAD.get(command, {}).get(name, "")
            with refuses(UsageError, f"--set: {name} ", f"`align {command}`", instead):
                load_settings({}, [text], file=None, command=command)


def value_of(name):
    if name == "tracking.trackers":
        return "[mlflow]"
    if name == "train.file_weights":
        return "{a: 2}"
    default = flatten(Config())[name]
    return (default or "x") if isinstance(default, str) else VALUES[type(default)]


def test_names_of_other_tools_get_a_hint_and_a_line_of_the_page():
    own = {"lr": "train.lr", "train.max_length": "tokens.max_length"}
    for name, setting in (OURS | own).items():
        with refuses(UsageError, f"'{setting}'"):
            load_settings({}, [f"{name}=1"], file=None)
    for command, flag, meant in (
        ("train", "--learning_rate", "'--lr'"),
        ("train", "--adam-beta2", "'train.beta2'"),
        ("precompute-ref", "--learning-rate", "'train.lr'"),
        ("run", "--output_dir", "'--output'"),
        ("methods", "--learning-rate", "'train.lr'"),
        ("train", "--nothing-of-this-kind", ""),
    ):
        answer = align(command, flag, "1")
        assert answer.code == 2, answer
        require_names(answer.err, flag, meant)
    lines = page("docs/migrating.md").read_text(encoding="utf-8").splitlines()
    for name, setting in OURS.items():
        assert [one for one in lines if f"`{name}`" in one and one.endswith(f"| `{setting}` |")]


def opened(cache, **flags):
    given = {"train.method": "dpo", "train.cache": str(cache), **flags}
    return check(load_settings(given, [], file=None, command="train"))


def test_a_model_that_is_not_the_caches_is_refused(journey, world, here, monkeypatch):
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


def test_a_missing_library_is_named_first(here, journey, monkeypatch):
    data, train = ("nowhere.jsonl", "--model", "nowhere"), ("train", "--method", "dpo")
    own = [name for name in TRACKERS if tracker_of(name).library]
    for library in ("ray", "peft", *(tracker_of(name).library for name in own)):
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
