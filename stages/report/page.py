"""The HTML page of reports and sweeps: one file, without scripts and without external resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...schemas.safe_text import safe

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    """A titled section of a page; an empty section is left out."""

    title: str
    note: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    table: Sequence[Sequence[str]] = ()  # its first row is the head
    links: Mapping[str, str] = field(default_factory=dict)  # name in the first column -> URL
    figures: str = ""  # HTML of `charts`
    texts: Sequence[Mapping[str, str]] = ()  # heading -> text; each mapping is a card
    is_folded: bool = False

    @property
    def has_content(self) -> bool:
        """Whether the section has anything to show."""
        return bool(self.facts or self.table or self.figures or self.texts)


def render_page(
    title: str,
    sections: Sequence[Section],
    *,
    lead: Sequence[str] = (),
    alert: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
) -> str:
    """The page as HTML, its text escaped and secrets masked; `alert` describes problems."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_secrets,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        lead=lead,
        alert=alert,
        facts=facts or {},
        sections=[section for section in sections if section.has_content],
    )


def _without_secrets(value: Any) -> Any:
    return safe(value) if isinstance(value, str) and not isinstance(value, Markup) else value
