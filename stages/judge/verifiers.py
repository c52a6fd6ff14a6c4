"""Checks of samples without a model: equality, a regular expression, or a function."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

from ...schemas.config import JudgeOptions
from ...schemas.errors import UsageError

Row: TypeAlias = "Mapping[str, Any]"  # of the samples' table
# A row and the text of its sample: its score, or None where it has no reference answer.
Verifier: TypeAlias = "Callable[[Row, str], float | None]"


def verifier_of(options: JudgeOptions, columns: Sequence[str]) -> tuple[Verifier, dict[str, str]]:
    """The check that the settings ask for, and what names it."""
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
    """1 for the reference answer itself; blanks around both do not count, and all else does."""

    def verify(row: Row, text: str) -> float | None:
        wanted = row[column]
        return None if wanted is None else float(text.strip() == str(wanted).strip())

    return verify


def _matching(column: str, pattern: str) -> Verifier:
    """1 where the first group of the first match is the reference answer; no match is 0."""
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
    """The function of `MODULE:FUNCTION`, from the current folder too, and its source's digest."""
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
    file = inspect.getsourcefile(module)
    content = Path(file).read_bytes() if file else b""
    return function, {"source": hashlib.sha256(content).hexdigest()}


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
