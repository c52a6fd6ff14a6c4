"""How `make docs` turns these pages into a site; index.md alone decides their order."""

import re
from pathlib import Path

from sphinx.application import Sphinx

_SECTION = re.compile(r"^## (?P<caption>.+)$(?P<body>(?:\n(?!## ).*)*)", re.MULTILINE)
_PAGE = re.compile(r"^- \[[^\]]+\]\((?P<page>[a-z-]+)\.md\)", re.MULTILINE)

project = "align"
author = "The align maintainers"
copyright = author  # noqa: A001 - Sphinx's name for it
version = release = re.search(
    r'__version__ = "(.+)"', (Path(__file__).parents[1] / "__init__.py").read_text("utf-8")
)[1]

extensions = ["myst_parser"]
myst_heading_anchors = 3  # as GitHub names them
html_theme = "furo"
html_title = f"align {release}"
html_copy_source = False
html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """Gives the index its table of contents."""
    app.connect("source-read", _add_contents)


def _add_contents(_: Sphinx, page: str, source: list[str]) -> None:
    """The lists of index.md as Sphinx wants them, so that the page itself stays plain Markdown."""
    if page != "index":
        return
    for section in _SECTION.finditer(source[0]):
        pages = "\n".join(found["page"] for found in _PAGE.finditer(section["body"]))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {section['caption']}\n\n{pages}\n```\n"
