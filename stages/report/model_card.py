"""The model card (README.md) of a trained model: front matter, a description, and tables."""

from __future__ import annotations

import json
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
            cells = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
            lines += ["", f"## {title}", "", "| | |", "|---|---|", *cells]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return inline(text).replace("|", "\\|") or "none"


def inline(text: str) -> str:
    """The text as one line, without secrets and backticks."""
    return " ".join(safe(text).replace("`", "").split("\n"))
