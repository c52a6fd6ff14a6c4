"""The summary of a cache as plain text, for a terminal or a log."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...schemas.cache import Stops
from ...schemas.errors import counted
from ...schemas.rows import Role

if TYPE_CHECKING:
    from .cache_summary import KtoWeights, PairSummary, RoleSummary, Spread, Summary

MAX_LISTED = 8
LENGTHS = ("min", "p50", "p90", "p99", "max", "mean")
LOGPS = ("min", "p1", "p50", "p99", "max", "mean")


def render(summary: Summary) -> str:
    """All sections, less than 90 columns wide unless a name is longer."""
    sections = {
        "Cache": _cache(summary),
        "Rows": _rows(summary),
        "Lengths in tokens": _lengths(summary),
        "Truncation": _truncation(summary),
        "Balance": _balance(summary),
        "Reference log-probs": _logps(summary),
        "Drops": _drops(summary),
    }
    blocks = ["\n".join([heading(title), *lines]) for title, lines in sections.items()]
    return "\n\n".join(blocks) + "\n"


def _cache(summary: Summary) -> list[str]:
    made = summary.fingerprint
    model = printable(summary.model) or "unnamed"
    adapter = f" + adapter {printable(summary.adapter)}" if summary.adapter else ""
    settings = [made[name] for name in ("model.dtype", "model.attention") if name in made]
    limits = [f"max_length {made['tokens.max_length']}"] if "tokens.max_length" in made else []
    how = ", ".join([*settings, *limits])
    return facts(
        [
            ("name", f"{printable(summary.name)}  (align {summary.align_version})"),
            ("root", summary.root),
            ("reference", f"{model}{adapter}"),
            ("", printable(f"{summary.reference_key[:16]}  {how}").rstrip()),
            *_stops(summary),
            ("shards", f"{summary.shards:,}  ({size(summary.bytes)})"),
            *_inputs(summary),
        ]
    )


def _stops(summary: Summary) -> list[tuple[str, str]]:
    stops = Stops.of(summary.fingerprint)
    calls = stops.tool_calls if stops.tool_calls != stops.turn else None
    ended = {"turns end with": stops.turn, "tool calls with": calls, "plain text with": stops.text}
    return [(name, printable(stop.description)) for name, stop in ended.items() if stop]


def _inputs(summary: Summary) -> list[tuple[str, str]]:
    shown = [
        f"{printable(entry.name)}  ({counted(entry.rows, 'rows')}, {size(entry.bytes)}, "
        f"sha256 {entry.sha256[:12]})"
        for entry in summary.inputs[:MAX_LISTED]
    ]
    left = len(summary.inputs) - len(shown)
    lines = [*shown, *([f"and {counted(left, 'more files')}"] if left else [])]
    return [("" if index else "inputs", line) for index, line in enumerate(lines)]


def _rows(summary: Summary) -> list[str]:
    of = f" of {summary.rows_in:,} read" if summary.rows != summary.rows_in else ""
    lines = [
        (name, f"{role.branches:,}", share(role.branches, summary.branches), f"{role.tokens:,}")
        for name, role in _roles(summary)
    ]
    total = ("all", f"{summary.branches:,}", "", f"{summary.tokens:,}")
    learned = sum(role.learned for role in summary.roles.values())
    note = (
        f"  {learned:,} of these tokens are learned, those of "
        f"{LEARNED[summary.fingerprint.get('tokens.learn', 'assistant')]}"
    )
    return [
        f"  {counted(summary.rows, 'rows')}{of}: {summary.prompts.tokens:,} prompt tokens, and "
        "these completions",
        *grid(("completions", "count", "share", "tokens"), [*lines, total]),
        *([note] if learned < summary.tokens else []),
    ]


def _lengths(summary: Summary) -> list[str]:
    found = [("prompt", summary.prompts.lengths)]
    found += [(name, role.lengths) for name, role in _roles(summary)]
    return spreads("", found, decimals=0)


def _truncation(summary: Summary) -> list[str]:
    prompts = summary.prompts
    lines = [("prompt", prompts.cut_rows, summary.rows, prompts.cut_tokens, prompts.tokens)]
    lines += [
        (name, role.cut_branches, role.branches, role.cut_tokens, role.tokens)
        for name, role in _roles(summary)
    ]
    if not any(line[1] for line in lines):
        return ["  nothing was cut"]
    return grid(
        ("", "cut", "share", "tokens cut", "share"),
        [
            (name, f"{cut:,}", share(cut, of), f"{lost:,}", share(lost, lost + kept))
            for name, cut, of, lost, kept in lines
        ],
    )


def _balance(summary: Summary) -> list[str]:
    lines = _pairs(summary.pairs) if summary.pairs else []
    candidates = summary.roles.get("candidate")
    if candidates:
        lines += facts([("per prompt", f"{candidates.branches / summary.rows:.1f} candidates")])
    weights = summary.kto_weights
    if weights is None:
        return lines or ["  one class only: KTO needs desirable and undesirable completions"]
    return [*lines, *facts(weight_facts(weights))]


def weight_facts(weights: KtoWeights) -> list[tuple[str, str]]:
    """The classes of KTO and the weights that balance them."""
    counts = f"{weights.num_desirable:,} desirable, {weights.num_undesirable:,} undesirable"
    auto = f"{weights.desirable_weight:.4g} and {weights.undesirable_weight:.4g}"
    return [("KTO classes", counts), ("auto weights", f"{auto}, so that wD nD = wU nU")]


def _pairs(pairs: PairSummary) -> list[str]:
    counts = {
        "reference prefers the rejected one": pairs.reference_prefers_rejected,
        "... per token": pairs.reference_prefers_rejected_per_token,
        "chosen is the longer one": pairs.chosen_is_longer,
        "rejected is the longer one": pairs.rejected_is_longer,
    }
    noisy = "the first two hint at noisy labels, the third at a bias to length."
    if pairs.reference_prefers_rejected is None:  # the cache is not scored
        noisy = "the first hints at a bias to length."
    return [
        *grid(
            (f"of {counted(pairs.pairs, 'pairs')}", "count", "share"),
            [
                (name, f"{count:,}", share(count, pairs.pairs))
                for name, count in counts.items()
                if count is not None
            ],
        ),
        f"  Far above 50%: {noisy}",
        "",
    ]


def _logps(summary: Summary) -> list[str]:
    roles = _roles(summary)
    sums = [(name, role.logps) for name, role in roles if role.logps]
    means = [(name, role.logps_per_token) for name, role in roles if role.logps_per_token]
    if not sums:
        return ["  none: the cache is not scored (cache.scored)"]
    lines = [
        *spreads("sum", sums, LOGPS, decimals=2),
        "",
        *spreads("per token", means, LOGPS, decimals=3),
    ]
    if "mismatched" in summary.roles:
        lines.append("  Mismatched completions answer another prompt: per token they are lower.")
    return lines


def _drops(summary: Summary) -> list[str]:
    dropped = [
        (printable(reason), f"{rows:,}", share(rows, summary.rows_in))
        for reason, rows in sorted(summary.rejected.items(), key=lambda item: -item[1])
    ]
    notes = [(worded(printable(note)), f"{count:,}", "") for note, count in summary.notes.items()]
    return [
        *(grid(("rejected", "rows", "share"), dropped) if dropped else ["  no row was dropped"]),
        *(["", *grid(("noted, and kept", "count", ""), notes)] if notes else []),
    ]


def _roles(summary: Summary) -> list[tuple[str, RoleSummary]]:
    """The roles in the order of `Role`, which JSON does not keep."""
    names = [role.name.lower() for role in Role]
    return [(name, summary.roles[name]) for name in names if name in summary.roles]


def spreads(
    title: str,
    found: Sequence[tuple[str, Spread]],
    names: tuple[str, ...] = LENGTHS,
    *,
    decimals: int,
) -> list[str]:
    """The lines of a table of spreads."""
    lines = [
        (label, *(f"{getattr(spread, name):,.{decimals}f}" for name in names))
        for label, spread in found
    ]
    return grid((title, *names), lines)


WIDTH = 88
WIDEST = 1_000_000  # columns of a table; a longer line would be wrapped


def heading(title: str) -> str:
    """A title on a rule of the page's width."""
    return f"── {title} ".ljust(WIDTH, "─")


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of any width: names left-aligned, numbers right-aligned."""
    # Here, because it is slow to import and only needed for tables.
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(Text(head[0]), min_width=12)
    for name in head[1:]:
        table.add_column(Text(name), min_width=8, justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    sink = io.StringIO()
    Console(file=sink, width=WIDEST, color_system=None, force_terminal=False).print(table)
    return [f"  {line}".rstrip() for line in sink.getvalue().splitlines()]


def facts(pairs: Sequence[Sequence[str]]) -> list[str]:
    """The lines of names and values."""
    width = max(12, *(len(pair[0]) for pair in pairs))
    return [f"  {pair[0].ljust(width)}  {pair[1]}".rstrip() for pair in pairs]


def printable(text: str) -> str:
    """One line without control characters."""
    return "".join(character for character in text if character.isprintable())


LEARNED = {  # by tokens.learn
    "assistant": "the assistant's turns",
    "last": "the assistant's last turn",
}
NOTES = {
    "rows_that_repeat_another_row": "duplicate rows",
    "rows_whose_template_changes_the_prompt": (
        "rows whose prompt changes when the template adds the answer (thinking blocks?)"
    ),
}


def worded(note: str) -> str:
    """The name of a note in words; a column name at its end is unchanged."""
    name, quote, column = note.partition("'")
    return NOTES.get(note) or name.replace("_", " ") + quote + column


def share(part: float, whole: float) -> str:
    """A part of a whole in percent, never rounded to 0 or 100."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.05:
        return "<0.1%"
    if 99.95 <= percent < 100:
        return ">99.9%"
    return f"{percent:.1f}%"


def size(num_bytes: int) -> str:
    """A number of bytes in readable units."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:,.1f} TB"


def duration(seconds: float) -> str:
    """A length of time in hours and minutes, or in seconds if it is shorter than one."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
