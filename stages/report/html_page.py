"""Self-contained pages, rendered from the templates in this folder.

The policy of a page lets a browser apply its one style sheet, and neither run nor load
anything: text that were ever taken for markup would have no effect.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...schemas.safe_text import safe

FOLDER = Path(__file__).parent


def render_page(template: str, **values: Any) -> str:
    """The page with these values, each escaped and without secrets and control characters."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_secrets,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"style": _style, "policy": _policy}
    return environment.get_template(template).render(values)


@cache
def _style() -> Markup:
    return Markup((FOLDER / "page.css").read_text(encoding="utf-8"))


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _without_secrets(value: Any) -> Any:
    """A value without secrets; HTML from a macro has none already."""
    return safe(value) if isinstance(value, str) and not isinstance(value, Markup) else value
