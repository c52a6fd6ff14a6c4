"""A self-contained HTML page, rendered from a template in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...schemas.safe_text import safe


def render_page(template: str, **values: Any) -> str:
    """The page with these values, each escaped and without secrets and control characters."""
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
    """A value without secrets; HTML from a macro has none already."""
    return safe(value) if isinstance(value, str) and not isinstance(value, Markup) else value
