"""The rules of CONTRIBUTING.md that the source itself shows."""

import ast
import re
from graphlib import CycleError, TopologicalSorter

from support.rooms import ROOMS, ROOT, STAGES

PATHS = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(PATHS)}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
VERBS = {"data", "feed", "judge", "pairing", "sample", "score", "select", "train"}
# Rooms that any verb uses, and which further rooms of this kind each of them may use.
NOUNS = {name: set() for name in ("engine", "methods", "model", "render", "server", "storage")}
NOUNS |= {name: {"storage"} for name in ("demo", "report", "sort", "tracking")}
# The rooms of pipeline/: each may import those before it.
ORDER = (
    *("options", "executors", "jobs", "precompute", "tables", "plan", "train", "rounds"),
    "commands",
)


def dotted(path):
    """`stages.storage.fs` of its file; a package has the name of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def outside_functions(node):
    """What runs as a module is loaded, and what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from outside_functions(child)


def imports_in(nodes, path):
    """Every module of this package that some code of a file imports."""
    package = path.relative_to(ROOT).parent.parts
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base = (*base, *node.module.split(".")) if node.module else base
            yield from (".".join((*base, alias.name)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            named = [getattr(node, "module", ""), *(alias.name for alias in node.names)]
            assert "align" not in {str(name).partition(".")[0] for name in named}, "not relative"


def room_of(module):
    """`stages.storage`, `pipeline.train`, `cli`."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] in {"stages", "pipeline"} else 1])


def is_before(there, here):
    """Whether one room of pipeline/ comes before another."""
    names = [room.partition("pipeline.")[2] for room in (there, here)]
    return all(name in ORDER for name in names) and ORDER.index(names[0]) < ORDER.index(names[1])


def may_import(importer, imported):
    """Whether the arrow from one module to another points down, or stays in a room."""
    here, there = room_of(importer), room_of(imported)
    if here == there or there in {"schemas", "__version__"} or here in {"", "__main__", "cli"}:
        return True
    if here.startswith("pipeline."):
        return there.startswith("stages.") or is_before(there, here)
    kind, tool = here.removeprefix("stages."), there.removeprefix("stages.")
    return here.startswith("stages.") and tool in NOUNS and tool in NOUNS.get(kind, NOUNS)


def test_imports_point_down_the_house():
    assert VERBS | {*NOUNS} == STAGES
    assert {path.parent.name for path in ROOT.glob("pipeline/*/__init__.py")} == {*ORDER}
    wrong = [
        f"{dotted(path)} imports {name}"
        for path, tree in TREES.items()
        for name in imports_in(ast.walk(tree), path)
        if not may_import(dotted(path), name)
    ]
    assert not wrong
    assert may_import("stages.score.score", "stages.model.loading.load")
    for importer, imported in (
        ("pipeline.train.train", "cli.main"),
        ("stages.score.score", "stages.data.encode"),
        ("stages.storage.disk.fs", "stages.report.charts"),
        ("stages.model.loading.load", "pipeline.train.train"),
        ("pipeline.plan.run_plan", "pipeline.train.train"),
        ("schemas.rows", "stages.storage.disk.fs"),
    ):
        assert not may_import(importer, imported)


def circle_in(trees):
    """Modules that import each other as they are loaded, or for a type checker."""
    names = {*map(dotted, trees)} - {""}  # the root takes what it offers from below, when asked
    graph = {}
    for path, tree in trees.items():
        found = imports_in(outside_functions(tree), path)
        inner = {name if name in names else name.rpartition(".")[0] for name in found}
        graph[dotted(path)] = inner & names
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_modules_make_no_circle_not_even_for_types():
    assert not circle_in(TREES)
    first = {ROOT / "room" / "a.py": ast.parse("from .inner.c import C")}
    for second, is_circle in (
        ("if TYPE_CHECKING:\n    from ...room.a import A", True),
        ("def run():\n    from .. import a", False),
    ):
        trees = first | {ROOT / "room" / "inner" / "c.py": ast.parse(second)}
        assert bool(circle_in(trees)) == is_circle


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
    """A model folder or a cache from elsewhere may be read, never run."""
    calls = ("pickle.load", "allow_pickle", "yaml.unsafe_load", "yaml.full_load")
    assert not [f"{path}: {one}" for path, text in TEXTS.items() for one in calls if one in text]
    loads = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert {load.get("weights_only") for load in loads} == {"True"}
