"""The rules of CONTRIBUTING.md that the source itself shows."""

import ast
import re
import subprocess
import sys

from support.rooms import ROOMS, ROOT

PATHS = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(PATHS)}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"


def test_imports_point_down():
    """The layers of pyproject.toml."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", LINT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_module_that_is_named_in_a_string_is_a_file_with_code():
    """A preload of a missing module is swallowed, and one of an empty package loads nothing."""
    texts = [
        node.value
        for path in [*TREES, *(ROOT / "tests").rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = {text for text in texts if re.fullmatch(rf"align\.({'|'.join(ROOMS)})\.[\w.]+", text)}
    assert named
    assert not [name for name in sorted(named) if not is_code(name.split(".")[1:])]


def is_code(parts):
    """Whether it is a file, or a name in one that defines it."""
    for count in range(len(parts), 0, -1):
        if (path := ROOT.joinpath(*parts[:count]).with_suffix(".py")) in TEXTS:
            return count == len(parts) or parts[count] in TEXTS[path]
    return False


def test_nothing_reads_a_pickle():
    calls = ("pickle.load", "allow_pickle", "yaml.unsafe_load", "yaml.full_load")
    assert not [f"{path}: {one}" for path, text in TEXTS.items() for one in calls if one in text]
    loads = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert {load.get("weights_only") for load in loads} == {"True"}
