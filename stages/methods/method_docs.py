"""The table of methods as text, JSON or Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...schemas.methods import Need, RowKind
from .method import Method
from .table import shown

WIDTH = 88
ROWS: dict[RowKind, str] = {
    "paired": "paired: one chosen and one rejected completion per row",
    "labelled": "labelled: desirable and undesirable completions",
    "grouped": "grouped: completions of one prompt, each with a score",
    "imitated": "imitated: chosen or desirable completions",
}
NEEDS: dict[Need, str] = {
    "reference": "the reference's log-probs",
    "mismatched": "the reference's log-probs of KL completions",
    "token_reference": "the reference's log-probs of every token",
    "values": "a value head",
    "collision_logps": "the policy's whole distribution",
    "scores": "scores in the data",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}
LEGEND = textwrap.fill(
    "For a completion: lp = log p, n = tokens, m = lp / n, r = lp - lp of the reference, lo = log "
    "odds. c is chosen, l rejected, D = r_c - r_l, b = beta, e = label_smoothing, w = the weight "
    "of its label. S is the sigmoid, LS its log; ± is + for desirable, - for undesirable. "
    "For a token: p = policy / reference, A = advantage, V = value, R = return. s is a score.",
    WIDTH,
)


def describe(method: Method) -> dict[str, Any]:
    """The description of a method as plain values."""
    options = method.options.model_json_schema()["properties"]
    return {
        "name": method.name,
        "formula": method.formula,
        "rows": method.rows,
        "mean_over": method.items,
        "rewards": method.rewards,
        "needs": [name for name in NEEDS if name in method.needs],
        "head": method.head,
        "use": method.use,
        "source": method.source,
        "options": [
            {
                "name": name,
                "default": one["default"],
                "values": _allowed(one),
                "help": one["description"],
            }
            for name, one in options.items()
        ],
    }


def render_table(methods: Sequence[Method]) -> str:
    """All methods as text, grouped by the kind of their rows, three lines each."""
    blocks = []
    for kind, title in ROWS.items():
        lines = [title]
        for method in (one for one in methods if one.rows == kind):
            needs = f"needs {_needs(method)}; {_defaults(method) or 'no options'}"
            lines += [f"  {method.name:<18}{method.formula}", _wrapped(" " * 20, needs)]
            lines.append(f"{'':20}{method.source}")
        if len(lines) > 1:
            blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, LEGEND]) + "\n"


def render_method(method: Method) -> str:
    """One method as text, with the meaning of each option."""
    described = {
        "loss": method.formula,
        "": f"mean over all {method.items} of an optimizer step",
        "rewards": method.rewards or "none",
        "rows": ROWS[method.rows],
        "needs": _needs(method),
        "use": method.use,
        "source": method.source,
    }
    lines = [method.name, *(_wrapped(f"  {name:<9}", text) for name, text in described.items()), ""]
    options = describe(method)["options"]
    lines.append("options, each a flag or --set method.NAME=VALUE" if options else "no options")
    for one in options:
        head = f"  {one['name']:<20}{shown(one['default']) + ' ':<8}"
        lines.append(_wrapped(head, f"{one['help']} [{one['values']}]"))
    return "\n".join([*lines, "", LEGEND, ""])


def markdown_table(methods: Iterable[Method]) -> str:
    """A Markdown table with one line per method."""
    rows = [("method", "loss of a row, completion or token", "reads", "options"), ("---",) * 4]
    for one in methods:
        rows.append((f"`{one.name}`", f"`{one.formula}`", one.rows, _defaults(one)))
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def _needs(method: Method) -> str:
    """The needs of a method from the cache and the policy, in words."""
    names = [words for name, words in NEEDS.items() if name in method.needs]
    if method.head == "score":
        names.append("a policy that scores instead of writing")
    return " and ".join(names) or "no reference"


def _defaults(method: Method) -> str:
    """The options of a method with their defaults, in a line."""
    fields = method.options.model_fields
    return ", ".join(f"{name} {shown(one.default)}" for name, one in fields.items())


def _allowed(schema: Mapping[str, Any]) -> str:
    """The allowed values of an option, in words, from its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(map(_allowed, schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return " or ".join(schema.get("enum", [schema.get("const")]))
    kind = {"integer": "a whole number", "number": "a number", "string": "text"}[schema["type"]]
    found = [f"{words} {schema[name]:g}" for name, words in BOUNDS.items() if name in schema]
    limits = " and ".join(found)
    return f"{kind} of {limits}" if limits.startswith("at") else f"{kind} {limits}".rstrip()


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
