"""The rules of the house, read from its own walls."""

import ast
import re
import sys
import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest

from support.rooms import ROOMS, ROOT, STAGES

PATHS = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(PATHS)}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
VERBS = {"data", "feed", "judge", "pairing", "sample", "score", "select", "train"}
NOUNS = {"demo", "engine", "methods", "model", "report", "server", "storage", "tracking"}
# noun: further nouns it may use
NOUN_FRIENDS = {"demo": {"storage"}, "report": {"storage"}, "tracking": {"storage"}}
STANDARD = {*sys.stdlib_module_names, "_typeshed"}
# Where the internals of a third party are used.
COMPAT = {
    "transformers": "stages.model.transformers_compat",
    "deepspeed": "stages.engine.deepspeed_compat",
    "torch": "stages.model.live_memory",
}


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


def imports_in(nodes, package):
    """Every module of this package that some code in one of its folders imports."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base = (*base, *node.module.split(".")) if node.module else base
            yield from (".".join((*base, alias.name)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            named = [getattr(node, "module", ""), *(alias.name for alias in node.names)]
            assert "align" not in {str(name).partition(".")[0] for name in named}, "not relative"


def room_of(module):
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "stages" else parts[0]


def may_import(importer, imported):
    """Whether the arrow from one room to another points down."""
    if importer == imported or imported in {"schemas", "__version__"}:
        return True
    if importer in {"", "__main__", "cli"}:
        return True
    if importer == "pipeline":
        return imported.startswith("stages.")
    kind = importer.removeprefix("stages.")
    target = imported.removeprefix("stages.")
    if not importer.startswith("stages.") or not imported.startswith("stages."):
        return False
    return target not in VERBS and (kind in VERBS or target in NOUN_FRIENDS.get(kind, set()))


def test_imports_point_down_the_house():
    assert VERBS | NOUNS == STAGES
    wrong = [
        f"{dotted(path)} imports {name}"
        for path, tree in TREES.items()
        for name in imports_in(ast.walk(tree), path.relative_to(ROOT).parent.parts)
        if not may_import(room_of(dotted(path)), room_of(name))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("importer", "imported", "is_down"),
    [
        ("cli", "pipeline", True),
        ("pipeline", "stages.score", True),
        ("stages.score", "stages.model", True),
        ("stages.report", "stages.storage", True),
        ("stages.storage", "schemas", True),
        ("pipeline", "cli", False),
        ("stages.score", "stages.data", False),
        ("stages.storage", "stages.report", False),
        ("stages.storage", "stages.pairing", False),
        ("stages.model", "pipeline", False),
        ("schemas", "stages.storage", False),
        ("schemas", "pipeline", False),
    ],
)
def test_what_down_means(importer, imported, is_down):
    assert may_import(importer, imported) == is_down


def circle_in(trees):
    """Modules that import each other as they are loaded, or for a type checker."""
    names = {*map(dotted, trees)} - {""}  # the root takes what it offers from below, when asked
    graph = {}
    for path, tree in trees.items():
        found = imports_in(outside_functions(tree), path.relative_to(ROOT).parent.parts)
        inner = {name if name in names else name.rpartition(".")[0] for name in found}
        graph[dotted(path)] = inner & names
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_modules_make_no_circle_not_even_for_types():
    assert not circle_in(TREES)


@pytest.mark.parametrize(
    ("second", "is_circle"),
    [
        ("from . import a", True),
        ("from ..room.a import A", True),
        ("try:\n    from .a import A\nexcept ImportError:\n    pass", True),
        ("if TYPE_CHECKING:\n    from .a import A", True),
        ("def run():\n    from . import a", False),
        ("import os", False),
    ],
)
def test_what_a_circle_means(second, is_circle):
    texts = {"a": "from .b import B", "b": "from .inner.c import C", "inner/c": "from ..d import D"}
    trees = {ROOT / "room" / f"{name}.py": ast.parse(text) for name, text in texts.items()}
    assert bool(circle_in(trees | {ROOT / "room" / "d.py": ast.parse(second)})) == is_circle


def test_the_name_of_a_file_and_of_a_public_class_stands_once():
    files = [path.stem for path in TREES if path.stem != "__init__"]
    top = [node for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    classes = [node.name for node in top if not is_private(node.name)]
    assert not [name for names in (files, classes) for name, n in Counter(names).items() if n > 1]


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_attributes(tree):
    """Attributes `x._name` of what is neither `self`, of this file nor of the standard library."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    owners = {"self", "cls", *sys.stdlib_module_names}
    for node in nodes:
        if not (isinstance(node, ast.Attribute) and is_private(node.attr)):
            continue
        if node.attr not in own and ast.unparse(node.value) not in owners:
            yield ast.unparse(node)


def private_imports(tree):
    """Imports of third parties' private names, and of transformers' and DeepSpeed's modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            root, _, module = node.module.partition(".")
            parts = [*module.split("."), *(alias.name for alias in node.names)]
            is_inner = root == "deepspeed" or (root == "transformers" and module)
            if root not in STANDARD and (is_inner or any(map(is_private, parts))):
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("deepspeed"))


def third_parties_internals(tree):
    return [*private_attributes(tree), *private_imports(tree)]


def test_private_names_of_third_parties_stand_in_one_file_for_each():
    found = {dotted(path) for path, tree in TREES.items() if third_parties_internals(tree)}
    assert found == set(COMPAT.values())
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in COMPAT:  # what a later version may rename has an upper bound
        (bounds,) = (one for one in listed if re.match(rf"{name}\b", one))
        assert re.fullmatch(rf"{name}>=[\d.]+,<[\d.]+", bounds)


@pytest.mark.parametrize(
    ("text", "is_internal"),
    [
        ("model.config._attn_implementation", True),
        ("optimizer._parameters = set()", True),
        ("from torch.nn.modules.dropout import _DropoutNd", True),
        ("from transformers.modeling_utils import AttentionInterface", True),
        ("from deepspeed.utils import numa", True),
        ("import deepspeed", True),
        ("from transformers import AutoConfig", False),
        ("from .deepspeed_compat import deepspeed", False),
        ("os._exit(1)", False),
        ("self._engine.step()", False),
        ("class Row:\n    _keys: int\n    def same(self, other):\n        other._keys", False),
    ],
)
def test_what_internal_means(text, is_internal):
    assert bool(third_parties_internals(ast.parse(text))) == is_internal


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
    assert [load["weights_only"] for load in loads] == ["True"]
