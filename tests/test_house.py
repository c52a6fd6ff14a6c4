"""The rules of the house, read from its own walls."""

import ast
import re
import sys
import tomllib
from collections import defaultdict

import pytest

from support.house_measures import (
    base_names_twice,
    import_circles,
    modules_of,
    public_classes_twice,
)
from support.rooms import ROOMS, ROOT, STAGES

FILES = sorted(
    [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
)
VERBS = {"data", "feed", "judge", "pairing", "sample", "score", "select", "train"}
NOUNS = {"demo", "engine", "methods", "model", "report", "server", "storage", "tracking"}
NOUN_FRIENDS = {
    name: {"storage"} for name in ("demo", "report", "tracking")
}  # noun: further nouns it may use
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


def text_of(path):
    return path.read_text(encoding="utf-8")


def dotted(path):
    """`stages.storage.fs` of its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    """Every module of this package that a file imports, wherever in the file."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            named = (*base, *(node.module or "").split(".")) if node.module else base
            for alias in node.names:
                yield ".".join([*named, alias.name])
        else:
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            module = getattr(node, "module", None)
            for name in [module] if module else names:
                assert str(name).partition(".")[0] != "align", f"{path}: import relatively"


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


def test_every_stage_is_a_verb_or_a_noun():
    assert VERBS | NOUNS == STAGES
    assert not VERBS & NOUNS


def test_imports_point_down_the_house():
    wrong = [
        f"{dotted(path)} imports {name}"
        for path in FILES
        for name in imports_of(path)
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
        ("stages.pairing", "stages.data", False),
        ("stages.storage", "stages.report", False),
        ("stages.storage", "stages.pairing", False),
        ("stages.model", "pipeline", False),
        ("schemas", "stages.storage", False),
        ("schemas", "pipeline", False),
    ],
)
def test_what_down_means(importer, imported, is_down):
    assert may_import(importer, imported) == is_down


def test_modules_make_no_circle_not_even_for_types():
    assert not import_circles(modules_of(ROOT), for_types=True)


def test_a_base_name_exists_once():
    assert not base_names_twice(modules_of(ROOT))


def test_a_public_class_name_exists_once():
    assert not public_classes_twice(modules_of(ROOT))


def test_every_sub_package_is_listed_for_packaging():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in FILES}
    assert all((folder / "__init__.py").is_file() for folder in folders)
    here = {f"align.{dotted(folder / '__init__.py')}".rstrip(".") for folder in folders}
    assert set(settings["packages"]) == here


def test_only_the_entry_is_at_the_root():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "cli.py"}


def test_type_checkers_find_everything_at_the_root():
    linked = {path.name for path in (ROOT / ".typing" / "align").iterdir()}
    assert linked == {"__init__.py", "__main__.py", "cli.py", "py.typed", *ROOMS}
    assert all((ROOT / ".typing" / "align" / name).exists() for name in linked)


def test_a_file_is_one_idea():
    lengths = {dotted(path): len(text_of(path).splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > LONGEST_FILE}


def test_a_function_fits_on_a_screen():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        f"{dotted(path)}.{node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, functions)
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
        and not is_command(node)
    }
    assert not long


def is_command(node):
    """A command's signature is its list of options, and they are its length."""
    signature = node.body[0].lineno - node.lineno
    body = node.end_lineno - node.body[0].lineno + 1
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    is_ours = any(text.startswith("app.command") for text in decorators)
    return is_ours and signature > body and body <= LONGEST_FUNCTION


COMPAT = {
    "transformers": "stages.model.transformers_compat",
    "deepspeed": "stages.engine.deepspeed_compat",
    "torch": "stages.model.live_memory",
}


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


STANDARD = {*sys.stdlib_module_names, "_typeshed"}


def third_parties_internals(text):
    tree = ast.parse(text)
    return [*private_attributes(tree), *private_imports(tree)]


def test_private_names_of_third_parties_stand_in_one_file_for_each():
    found = {dotted(path): third_parties_internals(text_of(path)) for path in FILES}
    assert {name for name, internals in found.items() if internals} == set(COMPAT.values())


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
    assert bool(third_parties_internals(text)) == is_internal


def test_a_third_party_whose_internals_are_used_has_a_lower_and_an_upper_bound():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in COMPAT:
        (bounds,) = (one for one in listed if re.match(rf"{name}\b", one))
        assert re.fullmatch(rf"{name}>=[\d.]+,<[\d.]+", bounds)


def test_nothing_reads_a_pickle():
    """A model folder or a cache from elsewhere may be read, never run."""
    calls = ("pickle.load", "allow_pickle", "yaml.unsafe_load", "yaml.full_load")
    assert not [
        f"{dotted(path)}: {call}" for path in FILES for call in calls if call in text_of(path)
    ]
    loads = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for path in FILES
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert [load["weights_only"] for load in loads] == ["True"]


def test_a_fixture_name_exists_once():
    """It means one thing then, wherever a test asks for it."""
    places = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.parse(text_of(path)).body:
            for name in fixture_names(node):
                places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 100
    assert not {name: found for name, found in places.items() if len(found) > 1}


def fixture_names(node):
    """The name of a fixture, if it is one: its own, or the one it is given."""
    for decorator in getattr(node, "decorator_list", []):
        is_called = isinstance(decorator, ast.Call)
        if ast.unparse(decorator.func if is_called else decorator) == "pytest.fixture":
            given = {one.arg: one.value for one in decorator.keywords} if is_called else {}
            yield given["name"].value if "name" in given else node.name
