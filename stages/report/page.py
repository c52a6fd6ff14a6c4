"""The one page of this program, without scripts and with nothing loaded from elsewhere."""

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
    """A titled part of a page; one without content is left out."""

    title: str
    note: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    table: Sequence[Sequence[str]] = ()  # its first row is the head
    links: Mapping[str, str] = field(default_factory=dict)  # of names in the first column
    figures: str = ""  # HTML, as `charts` makes it
    texts: Sequence[Mapping[str, str]] = ()  # by headings; each mapping is a card
    is_folded: bool = False

    @property
    def has_content(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.facts or self.table or self.figures or self.texts)


def render_page(
    title: str,
    sections: Sequence[Section],
    *,
    lead: Sequence[str] = (),
    alert: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
) -> str:
    """The page, its text escaped and without secrets; `alert` says what is wrong."""
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
