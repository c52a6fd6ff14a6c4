"""What is written beside a table of samples, of judged samples or of selected rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

TABLE_FORMAT = 1
TableKind: TypeAlias = Literal["samples", "judged", "selected"]


@dataclass(frozen=True)
class TableManifest:
    """Names a table, and what it was made from, by digests."""

    format_version: int
    align_version: str
    root: str  # the digest of all below: names the table
    kind: TableKind
    made_from: dict[str, str]  # a digest for each name, such as prompts, model, samples
    settings: dict[str, Any]
    counts: dict[str, int]  # what was counted on the way, by plain names
    rows: int
    file: str
    bytes: int
    sha256: str
