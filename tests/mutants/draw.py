"""Draws faults from the syntax tree by a seed: `python tests/mutants/draw.py --count 70 > FILE`.

Where a person plants what a person would get wrong, this takes any comparison, sign, constant,
condition or call as likely as another, so that no place is left out because nobody thought of it.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

from faults import ROOT, Fault, StaleFaultError, is_product, planted

COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
SAID = {"say", "say_once", "warn", "warning", "info", "debug", "note", "add_argument", "cast"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=70)
    options = parser.parse_args()
    draws = random.Random(options.seed)
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    files = list(filter(is_product, listed))
    weights = [len((ROOT / name).read_text().splitlines()) for name in files]
    faults: dict[str, Fault] = {}
    while len(faults) < options.count:
        file = draws.choices(files, weights)[0]
        fault = drawn(file, (ROOT / file).read_text(), draws)
        if fault:
            faults[fault.name] = fault
    print(f"# Drawn with --seed {options.seed} --count {options.count} from the sources then.\n")
    for fault in faults.values():
        print("[[fault]]")
        for key in ("name", "file", "inside", "old", "new", "harm"):
            print(f"{key} = {json.dumps(getattr(fault, key), ensure_ascii=False)}")
        print()


def drawn(file: str, source: str, draws: random.Random) -> Fault | None:
    """A fault of a file, or none where the chosen text is not the only one in its function."""
    choices = [
        (inside, node, new)
        for inside, function in _functions(ast.parse(source).body, "")
        for node, new in _edits(function)
    ]
    if not choices:
        return None
    inside, node, new = draws.choice(choices)
    old = ast.get_source_segment(source, node)
    assert old is not None
    name = f"drawn-{Path(file).stem}-{inside.split('.')[-1].strip('_')}-{node.lineno}"
    fault = Fault(name, file, inside, old, new, "drawn")
    try:
        planted(fault, source)
    except (StaleFaultError, SyntaxError):
        return None
    return fault


def _functions(body: list[ast.stmt], outer: str) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{outer}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{outer}{node.name}", node


def _edits(function: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    left_out = set(map(id, _not_behaviour(function)))
    for node in ast.walk(function):
        if id(node) not in left_out:
            yield from _edits_of(node)


def _edits_of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare(left, [operator], right):
            yield node, _written(ast.Compare(left, [COMPARED[type(operator)]()], right))
        case ast.BinOp(left, operator, right) if type(operator) in COMPUTED and not _is_text(node):
            yield node, _written(ast.BinOp(left, COMPUTED[type(operator)](), right))
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield node, _written(ast.BoolOp(other, values))
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield node, _written(operand)
        case ast.Constant(bool(value)):
            yield node, str(not value)
        case ast.Constant(int(value)):
            yield node, str(value + 1)
        case ast.If(test) | ast.IfExp(test):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Expr(ast.Call()):
            yield node, "pass"


def _not_behaviour(function: ast.AST) -> Iterator[ast.AST]:
    """Annotations, what is raised, and what is said to people."""
    for node in ast.walk(function):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for part in (node.returns, *(each.annotation for each in _all_arguments(node))):
                    if part:
                        yield from ast.walk(part)
            case ast.AnnAssign():
                yield from ast.walk(node.annotation)
            case ast.Raise() | ast.JoinedStr():
                yield from ast.walk(node)
            case ast.Expr(ast.Call() as call) | (ast.Call() as call) if _called(call) in SAID:
                yield from ast.walk(node)


def _all_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str)
        for side in sides
    )


def _written(node: ast.expr) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"


if __name__ == "__main__":
    main()
