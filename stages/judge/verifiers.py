"""Checks samples without a model: by equality, a regular expression, or a function."""

from __future__ import annotations

import hashlib
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from ...schemas.errors import UsageError
from ...schemas.json_codec import digest
from ...schemas.round_options import JudgeOptions

Row: TypeAlias = "Mapping[str, Any]"  # of the table of samples
# (row, text of its sample) -> score; None if the row has no reference answer.
Verifier: TypeAlias = "Callable[[Row, str], float | None]"

# Digests of loaded modules, because a file may be edited after this process has loaded it.
_sources: WeakKeyDictionary[ModuleType, str] = WeakKeyDictionary()
# In these folders the neighbours of a module are not part of the user's function.
_LIBRARIES = ("site-packages", "dist-packages")


def load_verifier(options: JudgeOptions, columns: Sequence[str]) -> tuple[Verifier, dict[str, str]]:
    """The check of judge.by, and the names and digests on which its scores depend."""
    if options.by == "function":
        function, source = _import_function(options.function)
        return _checked(function, options.function), {"function": options.function, **source}
    pattern = None
    if options.by == "regex":
        try:
            pattern = re.compile(options.pattern)
        except re.error as error:
            raise UsageError(
                f"judge.pattern: {options.pattern!r} is not a regular expression: {error}. "
                "Correct it."
            ) from error
        if not pattern.groups:
            raise UsageError(
                f"judge.pattern: {options.pattern!r} has no group. Put parentheses around the "
                r"part to compare, for example 'Answer: (\d+)'."
            )
    column = options.answer
    if column not in columns:
        raise UsageError(
            f"judge.answer: the samples have no column {column!r}. Name the column of the "
            f"reference answers by --answer; there are {', '.join(columns)}."
        )

    def verify(row: Row, text: str) -> float | None:
        """1 if the text equals the reference answer, apart from surrounding whitespace, else 0."""
        reference = row[column]
        if reference is None:
            return None
        if pattern:
            found = pattern.search(text)
            if not found or found[1] is None:
                return 0.0
            text = found[1]
        return float(text.strip() == str(reference).strip())

    return verify, {"answer": column, **({"pattern": options.pattern} if pattern else {})}


def _import_function(name: str) -> tuple[Callable[..., Any], dict[str, str]]:
    """The function `MODULE:FUNCTION`, also from the current folder, and the digest of its code."""
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise UsageError(
            f"judge.function: expected MODULE:FUNCTION, found {name!r}. Name it by --function."
        )
    here = str(Path.cwd())
    before = {*sys.modules}
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"judge.function: {module_name} cannot be imported: {_summary(error)}. Run align in "
            "the module's folder, or add the folder to PYTHONPATH."
        ) from error
    finally:
        sys.path.remove(here)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(
            f"judge.function: {module_name} has no function {function_name!r}. Correct the name."
        )
    if module not in _sources:
        _sources[module] = _source_of(module, sys.modules.keys() - before)
    return function, {"source": _sources[module]}


def _source_of(module: ModuleType, loaded: Iterable[str]) -> str:
    """The digest of a module's file and of the files in its folder that it imports."""
    own = vars(module).get("__file__")
    if not own:  # a module of Python itself
        return ""
    files = {Path(own)}
    if Path(own).parent.name not in _LIBRARIES:
        names = [vars(sys.modules[one]).get("__file__") for one in loaded]
        paths = [Path(name) for name in names if name]
        files |= {path for path in paths if path.parent == Path(own).parent}
    return digest({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})


def _checked(function: Callable[..., Any], name: str) -> Verifier:
    def verify(row: Row, text: str) -> float:
        where = f"{name}, sample {row['number']} of prompt {row['prompt_key']}"
        try:
            score = function(row["prompt"], text, row)
        except Exception as error:
            raise UsageError(
                f"{where}: the function raised {_summary(error)}. Correct it."
            ) from error
        if not isinstance(score, Real) or not math.isfinite(score):
            raise UsageError(
                f"{where}: the function returned {score!r:.60}. Return a finite number or a "
                "boolean."
            )
        return float(score)

    return verify


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
