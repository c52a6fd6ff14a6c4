"""The README of a trained model: what it is, and everything it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Lineage:
    """Where a trained model comes from."""

    method: str
    formula: str
    options: Mapping[str, str]  # of the method
    settings: Mapping[str, str]  # of the training
    policy: str
    reference: str
    reference_weights: str
    cache: str
    cache_root: str
    data: Mapping[str, str]  # file: sha256
    steps: int
    rows: int
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    mlflow_run: str


def model_card(lineage: Lineage, *, adapter_of: str = "") -> str:
    """Markdown with the front matter that model hubs read."""
    library = "peft" if adapter_of else "transformers"
    front = [
        "---",
        f"library_name: {library}",
        f"tags: [align, {lineage.method}, preference-alignment]",
        "---",
    ]
    said = (
        f"A LoRA adapter of `{_plain(adapter_of)}`, trained"
        if adapter_of
        else f"`{_plain(lineage.policy)}`, trained"
    )
    return "\n".join(
        [
            *front,
            f"# {lineage.method} with align",
            "",
            f"{said} by `{lineage.method}` for {lineage.steps:,} steps on {lineage.rows:,} rows.",
            f"Loss: `{_plain(lineage.formula)}`.",
            *_table("Lineage", _origins(lineage)),
            *_table("Data (sha256)", lineage.data),
            *_table("Method", lineage.options),
            *_table("Training", lineage.settings),
            *_table("Last metrics", {name: f"{v:.6g}" for name, v in lineage.metrics.items()}),
            *_table("Versions", lineage.versions),
            "",
        ]
    )


def _origins(lineage: Lineage) -> dict[str, str]:
    return {
        "policy began as": lineage.policy,
        "reference": lineage.reference,
        "reference weights": lineage.reference_weights,
        "cache": lineage.cache,
        "cache root": lineage.cache_root,
        "MLflow run": lineage.mlflow_run or "none",
    }


def _table(title: str, rows: Mapping[str, str]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return ["", f"## {title}", "", "| | |", "|---|---|", *lines]


def _cell(text: str) -> str:
    return _plain(str(text)).replace("|", "\\|") or "none"


def _plain(text: str) -> str:
    return "".join(c for c in text if c.isprintable() and c != "`")
