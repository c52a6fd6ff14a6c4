"""Measures a tree of align: how many doors it has, how long they are, and what stands twice.

`python tests/support/house_measures.py [ROOT]` prints a table of any tree, this one or another.
"""

import ast
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str  # stages.storage.fs; a package has the name of its folder
    lines: int
    tree: ast.Module
    is_package: bool

    @property
    def base_name(self):
        return self.name.rpartition(".")[2]

    @property
    def function_lines(self):
        """The length of every function, inner ones too, without its decorators."""
        functions = (node for node in ast.walk(self.tree) if isinstance(node, FUNCTIONS))
        return [node.end_lineno - node.lineno + 1 for node in functions]

    @property
    def public_classes(self):
        classes = (node.name for node in self.tree.body if isinstance(node, ast.ClassDef))
        return [name for name in classes if not name.startswith("_")]


def modules_of(root):
    """Every file of the package: those at the root, and those in a package below it."""
    rooms = [path.parent for path in root.glob("*/__init__.py") if path.parent.name != "tests"]
    paths = [*root.glob("*.py"), *(path for room in rooms for path in room.rglob("*.py"))]
    return [module_of(path, root) for path in sorted(paths)]


def module_of(path, root):
    text = path.read_text(encoding="utf-8")
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, len(text.splitlines()), ast.parse(text), is_package)


def standing_twice(named):
    """The names that belong to more than one module, from pairs of a name and a module's name."""
    owners = defaultdict(list)
    for name, owner in named:
        owners[name].append(owner)
    return {name: found for name, found in sorted(owners.items()) if len(found) > 1}


def base_names_twice(modules):
    """Modules of one name in two folders."""
    files = [module for module in modules if not module.is_package]
    return standing_twice((module.base_name, module.name) for module in files)


def public_classes_twice(modules):
    """Public classes of one name in two modules."""
    return standing_twice(
        (name, module.name) for module in modules for name in module.public_classes
    )


def import_circles(modules, *, for_types):
    """Groups of modules that import each other as they are loaded, or also for type checkers."""
    graph = {module.name: imported_by(module, modules, for_types=for_types) for module in modules}
    reached = {name: reachable(graph, name) for name in graph}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph
        if name in reached[name]
    }
    return sorted(map(sorted, groups))


def imported_by(module, modules, *, for_types):
    """The modules of this package that a module imports outside of functions."""
    names = {other.name for other in modules}
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    found = set()
    for node in statements(module.tree.body, for_types=for_types):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                found.add(inner if inner in names else ".".join(base))
    return found & names


def statements(body, *, for_types):
    """Every statement that runs as a module is loaded."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from node.body if for_types else ()
            yield from statements(node.orelse, for_types=for_types)
        elif not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node
            for part in ("body", "orelse", "finalbody", "handlers"):
                yield from statements(getattr(node, part, []), for_types=for_types)


def reachable(graph, start):
    """Every module that is imported by way of another."""
    seen, waiting = set(), [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def spread(lengths):
    """How long things are."""
    ninth = statistics.quantiles(lengths, n=10, method="inclusive")[-1]
    return f"{statistics.median(lengths):.0f} / {ninth:.0f} / {max(lengths)}"


def table(root):
    """Every measure of a tree, by its name."""
    modules = modules_of(root)
    files = [module for module in modules if not module.is_package]
    lengths = [module.lines for module in files]
    functions = [lines for module in files for lines in module.function_lines]
    loaded = import_circles(modules, for_types=False)
    checked = import_circles(modules, for_types=True)
    return {
        "modules without __init__": f"{len(files):,}",
        "lines": f"{sum(module.lines for module in modules):,}",
        "lines of a file: median / p90 / longest": spread(lengths),
        "files under 60 lines": f"{sum(lines < 60 for lines in lengths)}",
        "functions": f"{len(functions):,}",
        "lines of a function: median / p90 / longest": spread(functions),
        "base names twice": listed(base_names_twice(modules)),
        "public class names twice": listed(public_classes_twice(modules)),
        "import circles": listed([" + ".join(circle) for circle in loaded]),
        "import circles with those for types": listed([" + ".join(circle) for circle in checked]),
    }


def listed(names):
    return f"{len(names)}{': ' if names else ''}{', '.join(names)}"


if __name__ == "__main__":
    for measure, value in table(Path(sys.argv[1]) if sys.argv[1:] else ROOT).items():
        print(f"{measure:<46}{value}")
