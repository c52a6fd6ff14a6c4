"""Checks of samples without a model: equality, a regular expression, or a function."""

from __future__ import annotations

import ast
import hashlib
import importlib
import math
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import resolve_name
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from ...schemas.errors import UsageError
from ...schemas.json_codec import digest
from ...schemas.round_options import JudgeOptions

Row: TypeAlias = "Mapping[str, Any]"  # of the samples' table
# A row and the text of its sample: its score, or None where it has no reference answer.
Verifier: TypeAlias = "Callable[[Row, str], float | None]"


def verifier_of(options: JudgeOptions, columns: Sequence[str]) -> tuple[Verifier, dict[str, str]]:
    """The check that the settings ask for, and its identity."""
    if options.by == "function":
        function, source = _imported(options.function)
        return _checked(function, options.function), {"function": options.function, **source}
    if options.answer not in columns:
        raise UsageError(
            f"judge.answer: the samples have no column {options.answer!r} with a reference answer; "
            f"they have {', '.join(columns)}. Name it by --answer."
        )
    named = {"answer": options.answer}
    if options.by == "exact":
        return _exact(options.answer), named
    return _matching(options.answer, options.pattern), {**named, "pattern": options.pattern}


def _exact(column: str) -> Verifier:
    """A check that gives 1 for the reference answer itself, ignoring blanks around both."""

    def verify(row: Row, text: str) -> float | None:
        wanted = row[column]
        return None if wanted is None else float(text.strip() == str(wanted).strip())

    return verify


def _matching(column: str, pattern: str) -> Verifier:
    """A check that gives 1 if the first group of the first match is the reference answer."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"judge.pattern: {pattern!r} is not a regular expression: {error}.") from (
            error
        )
    if not compiled.groups:
        raise UsageError(
            f"judge.pattern: {pattern!r} has no group. Put parentheses around what is to be "
            r"compared, for example 'Answer: (\d+)'."
        )

    def verify(row: Row, text: str) -> float | None:
        wanted, found = row[column], compiled.search(text)
        if wanted is None:
            return None
        group = found[1] if found else None
        return float(group is not None and group.strip() == str(wanted).strip())

    return verify


def _imported(name: str) -> tuple[Callable[..., Any], dict[str, str]]:
    """The function of `MODULE:FUNCTION`, also from the current folder, and its code's digest."""
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise UsageError(
            f"judge.function: expected MODULE:FUNCTION, found {name!r}. Name it by --function."
        )
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"judge.function: {module_name} cannot be imported: {_said(error)}. It is looked for "
            "in the current folder and in PYTHONPATH."
        ) from error
    finally:
        sys.path.remove(here)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"judge.function: {module_name} has no function {function_name!r}.")
    if module not in _sources:
        _sources[module] = _source_digest(module)
    return function, {"source": _sources[module]}


# Cached, because a file may be edited after this process has loaded it.
_sources: WeakKeyDictionary[ModuleType, str] = WeakKeyDictionary()
_LIBRARIES = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]


def _source_digest(module: ModuleType) -> str:
    """The digest of a module, and of the modules that it imports from its package or folder."""
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        one = waiting.pop()
        file = _file_of(one)
        if one.__name__ in found or file is None or not _is_beside(one, file, module):
            continue
        content = file.read_bytes()
        found[one.__name__] = hashlib.sha256(content).hexdigest()
        names = _imported_by(ast.parse(content).body, one.__package__ or "")
        waiting += [sys.modules[name] for name in names if name in sys.modules]
    return digest(found)


def _imported_by(statements: Sequence[ast.stmt], package: str) -> Iterator[str]:
    """Names of possible modules in the imports that run when the module is loaded."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            dotted = "." * statement.level + (statement.module or "")
            home = resolve_name(dotted, package) if statement.level else dotted
            yield from (home, *(f"{home}.{alias.name}" for alias in statement.names))
        elif isinstance(statement, ast.Try):
            handled = [line for handler in statement.handlers for line in handler.body]
            yield from _imported_by([*statement.body, *handled], package)


def _is_beside(one: ModuleType, file: Path, module: ModuleType) -> bool:
    top = module.__name__.partition(".")[0]
    if one.__name__.partition(".")[0] == top:
        return True
    home = _file_of(sys.modules.get(top, module))
    folder = home.parents[home.name == "__init__.py"] if home else None
    is_library = any(file.is_relative_to(library) for library in _LIBRARIES)
    return folder is not None and file.is_relative_to(folder) and not is_library


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") else None


def _checked(function: Callable[..., Any], name: str) -> Verifier:
    def verify(row: Row, text: str) -> float:
        where = f"{name}, sample {row['number']} of prompt {row['prompt_key']}"
        try:
            score = function(row["prompt"], text, row)
        except Exception as error:
            raise UsageError(f"{where}: it raised {_said(error)}. Correct it.") from error
        if not isinstance(score, Real) or not math.isfinite(score):
            raise UsageError(
                f"{where}: it returned {score!r:.60}. Return a finite number, or true or false."
            )
        return float(score)

    return verify


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
