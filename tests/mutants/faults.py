"""Faults: small wrong edits of the product, each found again by its function and its text."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEYS = {"name", "file", "inside", "old", "new", "harm"}


@dataclass(frozen=True)
class Fault:
    """An edit of the text `old`, which stands once in the function `inside` of a file."""

    name: str
    file: str
    inside: str
    old: str
    new: str
    harm: str
    equivalent: str = ""  # why no test can tell it from the right program


class StaleFaultError(Exception):
    """The product has changed where a fault was planted; the fault has to be planted again."""


def read_faults() -> list[Fault]:
    """All faults that are planted, in the order of their files."""
    faults = []
    for path in sorted((HERE / "planted").glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["fault"]:
            if not entry.keys() >= KEYS:
                raise StaleFaultError(f"{path.name}: {entry} lacks {KEYS - entry.keys()}")
            faults.append(Fault(**entry))
    names = [fault.name for fault in faults]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise StaleFaultError(f"faults named twice: {sorted(twice)}")
    return faults


def planted(fault: Fault, source: str) -> str:
    """The source with the fault in it."""
    begin = _place(fault, source)
    changed = source[:begin] + fault.new + source[begin + len(fault.old) :]
    if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
        raise StaleFaultError(f"{fault.name}: changes nothing in {fault.file}")
    return changed


def _place(fault: Fault, source: str) -> int:
    begin, end = _span(fault, source)
    if source.count(fault.old, begin, end) != 1:
        raise StaleFaultError(
            f"{fault.name}: not once in {fault.file}, {fault.inside}: {fault.old!r}"
        )
    return source.index(fault.old, begin, end)


def _span(fault: Fault, source: str) -> tuple[int, int]:
    if not fault.inside:
        return 0, len(source)
    body: list[ast.stmt] = ast.parse(source).body
    for part in fault.inside.split("."):
        named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((x for x in body if isinstance(x, named) and x.name == part), None)
        if node is None:
            raise StaleFaultError(f"{fault.name}: {fault.file} has no {fault.inside}")
        body = node.body
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[: node.end_lineno]))
