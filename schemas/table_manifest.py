"""The manifest of a table of samples, of judged samples or of selected rows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from .samples import Drawing

TABLE_FORMAT = 1
TableKind: TypeAlias = Literal["samples", "judged", "selected"]


@dataclass(frozen=True)
class TableManifest:
    """The manifest of a table: its digests, and those of its inputs."""

    format_version: int
    root: str  # the table's name: a digest of all other fields
    kind: TableKind
    made_from: dict[str, str]  # a digest for each name, such as prompts, model, samples
    settings: dict[str, Any]
    counts: dict[str, int]  # by name
    rows: int
    columns: dict[str, str]  # the type of each, by name
    bytes: int  # of the file, up to its footer
    sha256: str  # of these bytes
    # How the samples of a judged or selected table were drawn.
    sampling: Drawing | None

    @property
    def drawing(self) -> Drawing | None:
        """The distribution that its samples were drawn from, if it is known."""
        if self.kind != "samples":
            return self.sampling
        names = [one.name for one in fields(Drawing)]
        is_known = self.settings.keys() >= {*names}
        return Drawing(*(self.settings[name] for name in names)) if is_known else None
