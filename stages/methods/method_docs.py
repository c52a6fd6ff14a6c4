"""The table of methods as text, JSON or Markdown, and the meaning of every option."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...schemas.methods import Head, Need, RowKind
from .method import Method
from .modifiers import Modifiers, names_within

WIDTH = 88
NAMED_METHODS = 3  # more are counted where an option of many methods is explained
ROWS: dict[RowKind, str] = {
    "paired": "paired: one chosen and one rejected completion per row",
    "labelled": "labelled: desirable and undesirable completions",
    "grouped": "grouped: completions of one prompt, each with a score",
    "imitated": "imitated: chosen or desirable completions",
}
NEEDS: dict[Need, str] = {
    "reference": "the reference's log-probs",
    "mismatched": "those of mismatched completions",
    "token_reference": "those of every token",
    "values": "a value head",
    "purity": "the policy's whole distribution",
    "scores": "scores of the data",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}
LEGEND = textwrap.fill(
    "Of a completion: lp = log p, n = tokens, m = lp / n, r = lp - lp of the reference, lo = log "
    "odds. c is chosen, l rejected, D = r_c - r_l, b = beta, e = label_smoothing, w = the weight "
    "of its label. S is the sigmoid, LS its log; ± is + for desirable, - for undesirable. "
    "Of a token: p = policy / reference, A = advantage, V = value, R = return. s is a score.",
    WIDTH,
)


@dataclass(frozen=True)
class OptionDescription:
    """One option of a method."""

    name: str
    default: float | str
    values: str  # the allowed values, in words
    help: str


@dataclass(frozen=True)
class Description:
    """The description of one method."""

    name: str
    formula: str
    rows: RowKind
    mean_over: str
    rewards: str  # their formula; empty if there are none
    needs: tuple[Need, ...]
    head: Head
    use: str
    source: str
    options: tuple[OptionDescription, ...]

    @property
    def all_needs(self) -> str:
        """What it needs of the cache and of the policy, in words."""
        names = [NEEDS[name] for name in self.needs]
        if self.head == "score":
            names.append("a policy that scores instead of writing")
        return " and ".join(names) or "no reference"

    @property
    def defaults(self) -> str:
        """Its options with their defaults, in a line."""
        return ", ".join(f"{one.name} {_shown(one.default)}" for one in self.options)


def describe(method: Method) -> Description:
    """Everything the table says about a method."""
    options = [
        OptionDescription(name, one["default"], _allowed(one), one["description"])
        for name, one in method.options.model_json_schema()["properties"].items()
    ]
    return Description(
        name=method.name,
        formula=method.formula,
        rows=method.rows,
        mean_over=method.items,
        rewards=method.rewards,
        needs=tuple(name for name in NEEDS if name in method.needs),
        head=method.head,
        use=method.use,
        source=method.source,
        options=tuple(options),
    )


def plain_table(methods: Iterable[Method]) -> list[dict[str, Any]]:
    """All methods as lists and dicts, for JSON."""
    return [dataclasses.asdict(describe(method)) for method in methods]


def render_table(methods: Sequence[Method]) -> str:
    """All methods as text, grouped by the kind of their rows, three lines each."""
    blocks = []
    for kind, title in ROWS.items():
        lines = [title]
        for one in (describe(method) for method in methods if method.rows == kind):
            needs = f"needs {one.all_needs}; {one.defaults or 'no options'}"
            lines += [f"  {one.name:<18}{one.formula}", _wrapped(" " * 20, needs)]
            lines.append(f"{'':20}{one.source}")
        if len(lines) > 1:
            blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, LEGEND]) + "\n"


def render_method(method: Method) -> str:
    """One method as text, with the meaning of each option."""
    one = describe(method)
    facts = {
        "loss": one.formula,
        "": f"mean over all {one.mean_over} of an optimizer step",
        "rewards": one.rewards or "none",
        "rows": ROWS[one.rows],
        "needs": one.all_needs,
        "use": one.use,
        "source": one.source,
    }
    lines = [one.name, *(_wrapped(f"  {name:<9}", text) for name, text in facts.items()), ""]
    lines.append("options, each a flag or --set method.NAME=VALUE" if one.options else "no options")
    for option in one.options:
        head = f"  {option.name:<20}{_shown(option.default) + ' ':<8}"
        lines.append(_wrapped(head, f"{option.help} [{option.values}]"))
    return "\n".join([*lines, "", LEGEND, ""])


def markdown_table(methods: Iterable[Method]) -> str:
    """A Markdown table with one line per method."""
    rows = [("method", "loss of a row, completion or token", "reads", "options"), ("---",) * 4]
    for one in map(describe, methods):
        rows.append((f"`{one.name}`", f"`{one.formula}`", one.rows, one.defaults))
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def options_of_all(methods: Iterable[Method]) -> dict[str, str]:
    """Every option of some method: what it means, its default, and the methods that have it.

    Of several meanings the most common one; the others are in `align methods NAME`.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for method in methods:
        taken = names_within(method.modifiers)
        fields = method.options.model_fields | {
            name: one for name, one in Modifiers.model_fields.items() if name in taken
        }
        for name, one in fields.items():
            text = f"{one.description} (default {_shown(one.default) or 'none'}"
            found.setdefault(name, {}).setdefault(text, []).append(method.name)
    meanings = {}
    for name, texts in found.items():
        text, names = max(texts.items(), key=lambda one: len(one[1]))
        of = ", ".join(names) if len(names) <= NAMED_METHODS else f"{len(names)} methods"
        meanings[name] = f"{text}; of {of})"
    return meanings


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


def _shown(value: float | str) -> str:
    return str(value) if isinstance(value, str | bool) else f"{value:g}"
