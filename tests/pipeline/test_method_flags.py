"""Flags of training: of settings, of methods' options, and with several values in a sweep."""

import typer

from align import cli
from align.pipeline.options.flags import varied_in
from align.pipeline.options.table import SETS
from align.stages.methods.modifiers import Modifiers
from align.stages.methods.table import METHODS

COMMANDS = typer.main.get_command(cli.app).commands
OPTIONS = {
    name
    for options in (Modifiers, *(method.options for method in METHODS.values()))
    for name in options.model_fields
}


def read(command, *words):
    """What the words of a command are read as."""
    with COMMANDS[command].make_context(command, [*map(str, words)]) as context:
        return context.params


def flags_of(command, *words):
    """The flags of a command, each as often as it is declared."""
    with COMMANDS[command].make_context(command, [*words]) as context:
        return [word for one in context.command.get_params(context) for word in one.opts]


def test_every_option_of_a_method_is_a_flag_of_what_trains():
    for command in ("train", "plan", "sweep"):
        for name in OPTIONS:
            flag = f"--{name.replace('_', '-')}"
            assert read(command, "--method", "kto", flag, "7")[f"method.{name}"] == "7"
        flags = flags_of(command, "--method", "kto")
        assert len(flags) == len({*flags})
    assert not {"--beta", "--kl-use"} & {*flags_of("precompute-ref")}


def test_a_sweep_takes_what_a_training_takes_and_varies_what_has_several_values():
    own = {f"--{name.partition('.')[2]}" for name in SETS["sweep"]}
    assert {*flags_of("train")} - own <= {*flags_of("sweep", "--method", "kto")}
    flags = {
        "train.lr": "1e-6,1e-5",
        "train.epochs": "2",
        "train.max_time": "3h30m",
        "train.cache": "a,b",  # a path may hold a comma
        "lora.enabled": True,
        "lora.targets": ["q_proj", "v_proj"],
        "method.beta": "0.1",
    }
    varied, fixed = varied_in(flags)
    assert varied == ["method.beta=0.1", "train.lr=1e-6,1e-5"]
    assert fixed == {
        "train.epochs": 2,
        "train.max_time": "3h30m",
        "train.cache": "a,b",
        "lora.enabled": True,
        "lora.targets": ["q_proj", "v_proj"],
    }
