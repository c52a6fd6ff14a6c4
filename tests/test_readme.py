"""What the README says of the methods is so."""

import os
import re
import shutil
import subprocess
import sys
import textwrap

from align.stages.methods.method_docs import markdown_table
from align.stages.methods.table import METHODS
from support.rooms import ROOMS, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title):
    """The text below a heading, up to the next one."""
    _, _, rest = README.partition(f"### {title}\n")
    assert rest, f"README has no section {title!r}"
    return re.split(r"^##+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def code_blocks(text):
    blocks = re.findall(r"((?:^(?:    .*)?\n)+)", text, flags=re.MULTILINE)
    return [textwrap.dedent(block).strip("\n") + "\n" for block in blocks if block.strip()]


def test_the_table_of_methods_is_the_one_that_align_methods_prints():
    assert markdown_table(METHODS.values()) in section("The methods")


def test_a_method_is_added_as_the_readme_shows(tmp_path, training_world):
    loss, lines = code_blocks(section("Adding a method"))
    import_line, row = lines.splitlines()  # the second as it stands in the tuple
    package = tmp_path / "align"
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, package / room, ignore=ignored)
    for file in ROOT.glob("*.py"):
        shutil.copy(file, package)
    (package / "stages" / "methods" / "square.py").write_text(loss)
    table = package / "stages" / "methods" / "table.py"
    text = table.read_text().replace("\n_ROWS = (\n", f"\n{import_line}\n\n_ROWS = (\n{row}\n")
    table.write_text(text)

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "align", *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "(b D - 1)^2" in run("methods", "square")
    trained = ("--cache", training_world.pairs, "--max-steps", 2, "--batch-size", 4, "--no-mlflow")
    assert "2 steps done" in run("train", "--method", "square", *trained)
