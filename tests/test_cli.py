"""What every command owes a person before it does anything."""

import subprocess
import sys
from pathlib import Path

import typer

from align import cli
from support.command import align, launch

COMMANDS = typer.main.get_command(cli.app).commands
HEAVY = {"deepspeed", "mlflow", "numpy", "polars", "pyarrow", "torch", "transformers"}
ASKED = """
import sys
import align
align.train, align.load_cache, align.load_run, align.precompute
from align import cli
for words in (["--help"], ["config"], ["init"]):
    sys.argv = ["align", *words]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code
print(*sys.modules)
"""


def test_every_command_and_option_is_explained():
    for name, command in COMMANDS.items():
        answer = align(name, "--help")
        assert answer.code == 0
        assert command.help.splitlines()[0] in " ".join(answer.out.split())
        assert not [option.name for option in command.params if not option.help]


def test_what_computes_nothing_imports_no_heavy_package(tmp_path):
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    *_, imported = done.stdout.splitlines()
    assert "align.cli" in imported.split()
    assert not HEAVY & {*imported.split()}


def test_the_script_and_the_module_are_the_same_program():
    script = Path(sys.executable).with_name("align")
    module, installed = launch("--help"), launch("--help", program=[script])
    assert module.out.replace("python -m align", "align").split() == installed.out.split()
    assert (module.code, installed.code, module.err) == (0, 0, "")


def test_what_is_no_command_or_option_is_a_usage_error():
    for words in (["nonsense"], ["precompute-ref", "--nonsense"], ["inspect"], ["--nonsense"]):
        answer = align(*words)
        assert answer.code == 2
        assert "Error" in answer.err
        assert "Traceback" not in answer.err
