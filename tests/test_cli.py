"""What every command owes a person before it does anything."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from align import cli
from support.command import align, launch

COMMANDS = typer.main.get_command(cli.app).commands
PARAMETERS = [
    (name, parameter) for name, command in COMMANDS.items() for parameter in command.params
]
HEAVY = ("torch", "transformers", "mlflow", "deepspeed", "pyarrow", "polars", "numpy")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(name):
    answer = align(name, "--help")
    assert answer.code == 0
    assert COMMANDS[name].help.splitlines()[0] in " ".join(answer.out.split())


def test_every_option_is_explained():
    assert len(PARAMETERS) > 90
    assert not [f"{name} {option.name}" for name, option in PARAMETERS if not option.help]


def test_help_and_settings_import_no_heavy_package(tmp_path):
    code = (
        "import sys\nfrom align import cli\n"
        "sys.argv = ['align', sys.argv[1]]\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    for argument in ("--help", "config", "init"):
        command = [sys.executable, "-c", code, argument]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]", argument


def test_the_script_and_the_module_are_the_same_program():
    script = Path(sys.executable).with_name("align")
    module, installed = launch("--help"), launch("--help", program=[script])
    assert module.out.replace("python -m align", "align").split() == installed.out.split()
    assert (module.code, installed.code, module.err) == (0, 0, "")


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["precompute-ref", "--nonsense"], ["inspect"], ["--nonsense"]]
)
def test_what_is_no_command_or_option_is_a_usage_error(arguments):
    answer = align(*arguments)
    assert answer.code == 2
    assert "Error" in answer.err
    assert "Traceback" not in answer.err


def test_only_the_commands_import_late():
    """The modules above the commands stay light, so that help is quick."""
    tree = ast.parse(Path(cli.__file__).read_text())
    modules = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    own = {
        f"pipeline.{one}"
        for one in ("flags", "round_commands", "signals", "terminal", "train_commands")
    }
    assert {"__future__", "pathlib", "typing"} | own == set(modules)
