"""The table of methods as text, JSON or Markdown."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ...schemas.json_codec import allowed, json_schema
from ...schemas.methods import Head, Method, Need
from .modifiers import BELONGS_TO, Modifiers

WIDTH = 88
ROWS = {
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
NAMED_METHODS = 3  # more are counted where an option of many methods is explained
HEADS: dict[Head, str] = {"score": "a policy that scores instead of writing"}
LEGEND = (
    "Of a completion: lp = log p, n = tokens, m = lp / n, r = lp - lp of the reference, lo = log "
    "odds. c is chosen, l rejected, D = r_c - r_l, b = beta, e = label_smoothing, w = the weight "
    "of its label. S is the sigmoid, LS its log; ± is + for desirable, - for undesirable. "
    "Of a token: p = policy / reference, A = advantage, V = value, R = return. s is a score."
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
    rows: str
    mean_over: str
    rewards: str  # their formula; empty if there are none
    needs: tuple[Need, ...]
    head: Head
    use: str
    source: str
    options: tuple[OptionDescription, ...]


def describe(method: Method) -> Description:
    """Everything the table says about a method."""
    return Description(
        name=method.name,
        formula=method.summary,
        rows=method.rows,
        mean_over=method.items,
        rewards=method.rewards.formula if method.rewards else "",
        needs=tuple(name for name in NEEDS if name in method.needs),
        head=method.head,
        use=method.use,
        source=method.source,
        options=tuple(_options(method.options)),
    )


def plain_table(methods: Iterable[Method]) -> list[dict[str, Any]]:
    """All methods as lists and dicts, for JSON."""
    return [dataclasses.asdict(describe(method)) for method in methods]


def render_table(methods: Sequence[Method]) -> str:
    """All methods as text, grouped by the kind of their rows, three lines each."""
    blocks = [
        [ROWS[kind], *_entries([method for method in methods if method.rows == kind])]
        for kind in ROWS
    ]
    tables = ["\n".join(block) for block in blocks if len(block) > 1]
    return "\n\n".join([*tables, textwrap.fill(LEGEND, WIDTH)]) + "\n"


def render_method(method: Method) -> str:
    """One method as text, with the meaning of each option."""
    description = describe(method)
    facts = {
        "loss": description.formula,
        "": f"mean over all {description.mean_over} of an optimizer step",
        "rewards": description.rewards or "none",
        "rows": ROWS[method.rows],
        "needs": _needs(description),
        "use": description.use,
        "source": description.source,
    }
    lines = [description.name, *(_wrapped(f"  {name:<9}", text) for name, text in facts.items())]
    options = [_option_lines(option) for option in description.options]
    head = "options, each a flag or --set method.NAME=VALUE" if options else "no options"
    legend = textwrap.fill(LEGEND, WIDTH)
    return "\n".join([*lines, "", head, *options, "", legend, ""])


def options_of_all(methods: Iterable[Method]) -> dict[str, str]:
    """Every option of some method: what it means, its default, and the methods that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for method in methods:
        taken = [
            one
            for one in dataclasses.fields(Modifiers)
            if BELONGS_TO.get(one.name, one.name) in method.modifiers
        ]
        for one in (*dataclasses.fields(method.options), *taken):
            default = _cell(cast("float | str", one.default)) or "none"
            text = f"{one.metadata['description']} (default {default}"
            found.setdefault(one.name, {}).setdefault(text, []).append(method.name)
    return {name: _meaning(texts) for name, texts in found.items()}


def _meaning(texts: dict[str, list[str]]) -> str:
    """The most common meaning; the others are in `align methods NAME`."""
    text, names = max(texts.items(), key=lambda one: len(one[1]))
    of = ", ".join(names) if len(names) <= NAMED_METHODS else f"{len(names)} methods"
    return f"{text}; of {of})"


def _options(options: type[Any]) -> Iterable[OptionDescription]:
    for name, option in json_schema(options)["properties"].items():
        yield OptionDescription(
            name=name,
            default=option["default"],
            values=allowed(option),
            help=option["description"],
        )


def _entries(methods: Sequence[Method]) -> Iterable[str]:
    for description in map(describe, methods):
        defaults = ", ".join(
            f"{option.name} {_shown(option.default)}" for option in description.options
        )
        yield f"  {description.name:<18}{description.formula}"
        yield _wrapped(" " * 20, f"needs {_needs(description)}; {defaults or 'no options'}")
        yield f"{'':20}{description.source}"


def _needs(description: Description) -> str:
    names = [NEEDS[name] for name in description.needs]
    heads = [HEADS[description.head]] if description.head in HEADS else []
    return " and ".join([*names, *heads]) or "no reference"


def _option_lines(option: OptionDescription) -> str:
    head = f"  {option.name:<20}{_shown(option.default) + ' ':<8}"
    return _wrapped(head, f"{option.help} [{option.values}]")


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


_HEAD = ("method", "loss of a row, completion or token", "reads", "options")


def markdown_table(methods: Iterable[Method]) -> str:
    """A Markdown table with one line per method."""
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD))]
    for description in map(describe, methods):
        options = ", ".join(
            f"{option.name} {_cell(option.default)}" for option in description.options
        )
        lines.append(
            _line([f"`{description.name}`", f"`{description.formula}`", description.rows, options])
        )
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _cell(value: float | str) -> str:
    return str(value) if isinstance(value, str | bool) else f"{value:g}"
