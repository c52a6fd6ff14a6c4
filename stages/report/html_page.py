"""Self-contained pages, rendered from the templates in this folder: HTML, or Markdown.

The policy of an HTML page lets a browser apply its one style sheet, and neither run nor load
anything: text that were ever taken for markup would have no effect.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...schemas.safe_text import beginning, safe

# What has a meaning in Markdown or in HTML; within a word `_` has none.
_MARKS = re.compile(r"""[\\`*\[\]<>|~&"'\n\r\t]|^[#+-]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])""")

FOLDER = Path(__file__).parent


def render_page(template: str, **values: Any) -> str:
    """The page with these values, each escaped and without secrets and control characters."""
    return _rendered(template, _without_secrets, values)


def render_markdown(template: str, **values: Any) -> str:
    """Likewise in Markdown, of which HTML is a part: every value is plain text there."""
    return _rendered(template, lambda value: _plain(_without_secrets(value)), values)


def _rendered(template: str, finalize: Callable[[Any], Any], values: dict[str, Any]) -> str:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["beginning"] = beginning
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


def _plain(value: Any) -> Any:
    """A value that becomes no heading, link, image or mention; what a reader sees is the same."""
    if not isinstance(value, str) or isinstance(value, Markup):  # escaped already
        return value
    plain = _MARKS.sub(lambda mark: f"&#{ord(mark[0])};", value)
    return Markup(plain.replace("@", "@&#8203;"))
