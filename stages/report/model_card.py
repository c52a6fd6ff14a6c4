"""The README of a trained model: its description and lineage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...schemas.errors import counted
from ...schemas.methods import Head
from ...schemas.safe_text import safe


@dataclass(frozen=True)
class Lineage:
    """The lineage of a trained model."""

    method: str
    formula: str
    head: Head
    padding_token: int | None
    options: Mapping[str, str]  # of the method
    stops: Mapping[str, str]  # stop tokens by kind of completion
    settings: Mapping[str, str]  # of the training
    policy: str
    reference: str
    reference_weights: str
    cache: str
    cache_root: str
    data: Mapping[str, str]  # file: sha256
    steps: int
    rows_seen: int  # over all epochs
    rows: int  # training rows
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    recorded: Mapping[str, str]  # the run's id or key in each tracker, by the tracker's title


def model_card(lineage: Lineage, *, adapter_of: str = "") -> str:
    """Markdown with the front matter that model hubs read."""
    library = "peft" if adapter_of else "transformers"
    front = [
        "---",
        f"library_name: {library}",
        *(["pipeline_tag: text-classification"] if lineage.head == "score" else []),
        f"tags: [align, {lineage.method}, preference-alignment]",
        "---",
    ]
    origin = f"`{_plain(adapter_of or lineage.policy)}`"
    said = f"A LoRA adapter of {origin}, trained" if adapter_of else f"{origin}, trained"
    if lineage.head == "score":
        said = f"A reward model: {said[0].lower()}{said[1:]}"
    steps = counted(lineage.steps, "steps")
    return "\n".join(
        [
            *front,
            f"# {lineage.method} with align",
            "",
            f"{said} by `{lineage.method}` for {steps}, {_seen(lineage)}.",
            f"Loss: `{_plain(lineage.formula)}`.",
            *_of_head(lineage, is_adapter=bool(adapter_of)),
            *_table("Lineage", _origins(lineage)),
            *_table("Data (sha256)", lineage.data),
            *_table("Method", lineage.options),
            *_table("Stop tokens", lineage.stops),
            *_table("Training", lineage.settings),
            *_table("Last metrics", {name: f"{v:.6g}" for name, v in lineage.metrics.items()}),
            *_table("Versions", lineage.versions),
            "",
        ]
    )


def _seen(lineage: Lineage) -> str:
    again = ", some of them again" if lineage.rows_seen > lineage.rows else ""
    return f"{counted(lineage.rows_seen, 'rows')} seen out of {lineage.rows:,}{again}"


def _of_head(lineage: Lineage, *, is_adapter: bool) -> list[str]:
    """The lines on a value head, or on the use of a reward model."""
    if lineage.head == "values":
        return [
            "",
            "`value_head.safetensors` holds the value head that was trained with the policy, a "
            "linear layer on its last hidden states. It is not part of the model; a training by "
            "ppo that begins from this folder begins with it.",
        ]
    if lineage.head != "score":
        return []
    kind, more = "AutoModelForSequenceClassification", ""
    if is_adapter:
        kind = "AutoPeftModelForSequenceClassification"
        more = f", num_labels=1, pad_token_id={lineage.padding_token}"
    return [
        "",
        f"Load it by `{kind}.from_pretrained(folder{more})`. Its one logit is the score of a "
        "prompt with its completion, read at the last token that is not the padding token "
        f"({lineage.padding_token}).",
    ]


def _origins(lineage: Lineage) -> dict[str, str]:
    return {
        "policy began as": lineage.policy,
        "reference": lineage.reference,
        "reference weights": lineage.reference_weights,
        "cache": lineage.cache,
        "cache root": lineage.cache_root,
        **(lineage.recorded or {"MLflow run": "none"}),
    }


def _table(title: str, rows: Mapping[str, str]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return ["", f"## {title}", "", "| | |", "|---|---|", *lines]


def _cell(text: str) -> str:
    return _plain(str(text)).replace("|", "\\|") or "none"


def _plain(text: str) -> str:
    return " ".join(safe(text).replace("`", "").split("\n"))
