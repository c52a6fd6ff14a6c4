"""Renders a template beside this file as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...schemas.safe_text import safe


def render_page(template: str, **values: Any) -> str:
    """The page of these values; each is escaped, without secrets and control characters."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_secrets,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def _without_secrets(value: Any) -> Any:
    """Cleans text; HTML that a macro made of it is clean already."""
    return safe(value) if isinstance(value, str) and not isinstance(value, Markup) else value
