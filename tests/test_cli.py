"""What every command owes a person before it does anything."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from align import cli
from support.command import align, launch

COMMANDS = typer.main.get_command(cli.app).commands
HEAVY = ("deepspeed", "mlflow", "numpy", "polars", "pyarrow", "torch", "transformers", "typer")
# Each line is what was asked for, how it ended, and which of these packages were imported by then.
ASKED = f"""
import sys
import align

def tell(asked, code):
    print("asked", asked, code, *[name for name in {HEAVY} if name in sys.modules])

tell("import", 0)
align.train, align.load_cache, align.load_run, align.precompute
tell("names", 0)
from align import cli
for words in ("--help", "config", "init", "train --method typo"):
    sys.argv = ["align", *words.split()]
    try:
        cli.main()
    except SystemExit as end:
        tell(words, end.code or 0)
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_explained(name):
    answer = align(name, "--help")
    assert answer.code == 0
    assert COMMANDS[name].help.splitlines()[0] in " ".join(answer.out.split())
    assert not [option.name for option in COMMANDS[name].params if not option.help]


def test_what_computes_nothing_imports_no_heavy_package(tmp_path):
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    *light, typo = [line for line in done.stdout.splitlines() if line.startswith("asked ")]
    assert light == [
        "asked import 0",
        "asked names 0",
        "asked --help 0 typer",
        "asked config 0 typer",
        "asked init 0 typer",
    ]
    assert typo.startswith("asked train --method typo 2 ")
    assert not {"deepspeed", "mlflow"} & {*typo.split()}


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
