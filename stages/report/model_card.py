"""The README of a trained model: front matter for model hubs, a description, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...schemas.methods import Head
from ...schemas.safe_text import safe


def model_card(
    front: Mapping[str, str], text: Sequence[str], tables: Mapping[str, Mapping[str, str]]
) -> str:
    """Markdown with the front matter that model hubs read."""
    matter = [f"{name}: {value}" for name, value in front.items()]
    lines = ["---", *matter, "---", *text]
    for title, rows in tables.items():
        if rows:
            cells = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
            lines += ["", f"## {title}", "", "| | |", "|---|---|", *cells]
    return "\n".join([*lines, ""])


def notes_on_head(head: Head, padding_token: int | None, *, is_adapter: bool) -> list[str]:
    """The lines on a value head, or on the use of a reward model."""
    if head == "values":
        return [
            "",
            "`value_head.safetensors` holds the value head that was trained with the policy, a "
            "linear layer on its last hidden states. It is not part of the model; a training by "
            "ppo that begins from this folder begins with it.",
        ]
    if head != "score":
        return []
    kind, more = "AutoModelForSequenceClassification", ""
    if is_adapter:
        kind = "AutoPeftModelForSequenceClassification"
        more = f", num_labels=1, pad_token_id={padding_token}"
    return [
        "",
        f"Load it by `{kind}.from_pretrained(folder{more})`. Its one logit is the score of a "
        "prompt with its completion, read at the last token that is not the padding token "
        f"({padding_token}).",
    ]


def _cell(text: str) -> str:
    return inline(text).replace("|", "\\|") or "none"


def inline(text: str) -> str:
    """Text of settings and data on one line, without secrets and marks of code."""
    return " ".join(safe(text).replace("`", "").split("\n"))
