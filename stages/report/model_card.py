"""The model card (README.md) of a trained model: front matter, a description, and tables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...schemas.safe_text import safe


def model_card(
    front: Mapping[str, Any], text: Sequence[str], tables: Mapping[str, Mapping[str, str]]
) -> str:
    """The card in Markdown; front matter values are JSON, which is valid YAML."""
    matter = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in front.items()]
    lines = ["---", *matter, "---", *text]
    for title, rows in tables.items():
        if rows:
            lines += ["", *_section(title, rows)]
    return "\n".join([*lines, ""])


def with_section(card: str, title: str, rows: Mapping[str, str]) -> str:
    """The card with a table at its end; an earlier one of this title is replaced."""
    rest = re.sub(rf"\n## {re.escape(title)}\n.*?(?=\n## |\Z)", "", card, flags=re.DOTALL)
    return "\n".join([rest.rstrip("\n"), "", *_section(title, rows), ""])


def _section(title: str, rows: Mapping[str, str]) -> list[str]:
    cells = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *cells]


def _cell(text: str) -> str:
    return inline(text).replace("|", "\\|") or "none"


def inline(text: str) -> str:
    """The text as one line, without secrets and backticks."""
    return " ".join(safe(text).replace("`", "").split("\n"))
