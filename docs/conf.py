"""How `make docs` turns these pages into a site.

index.md alone decides their order. cli.md and settings.md get their tables from the program.
Language models get the same pages as plain Markdown, and the index as llms.txt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from align.cli import app as commands
from align.pipeline.options.settings import flatten
from align.pipeline.options.settings_table import COMMANDS, SECTIONS, flag_of
from align.pipeline.options.yaml_values import in_yaml
from align.schemas.config import Config

if TYPE_CHECKING:
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
    """Gives the index its table of contents, and the reference its tables."""
    app.connect("source-read", _add)
    app.connect("builder-inited", lambda _: write_plain(Path(app.outdir)))


def _add(_: Sphinx, page: str, source: list[str]) -> None:
    """Behind the text of a page, so that the page itself stays plain Markdown."""
    if page == "index":
        source[0] = "\n".join([source[0], *_contents(source[0]), ""])
    source[0] = _with_tables(page, source[0])


def write_plain(folder: Path) -> None:
    """Writes llms.txt, and beside it the pages that it links to."""
    for path in Path(__file__).parent.glob("*.md"):
        name = "llms.txt" if path.stem == "index" else path.name
        text = _with_tables(path.stem, path.read_text("utf-8"))
        (folder / name).write_text(text, "utf-8")


def _with_tables(page: str, text: str) -> str:
    made = {"cli": _all_commands, "settings": _all_settings}
    return "\n".join([text, *made[page](), ""]) if page in made else text


def _contents(text: str) -> Iterator[str]:
    for section in _SECTION.finditer(text):
        yield f"```{{toctree}}\n:hidden:\n:caption: {section['caption']}\n"
        yield from (found["page"] for found in _PAGE.finditer(section["body"]))
        yield "```"


def _all_commands() -> Iterator[str]:
    for name, command in typer.main.get_command(commands).commands.items():
        context = typer.Context(command, info_name=f"align {name}")
        yield f"\n## align {name}\n\n{command.help}\n\n```text\n{command.epilog}\n```\n"
        yield "| argument or flag | meaning |\n|---|---|"
        for one in command.get_params(context):
            if one.name.startswith("method."):
                continue
            words = ", ".join(f"`{word}`" for word in one.opts)
            link = f" ([`{one.name}`](settings.md#{one.name.partition('.')[0]}))"
            meaning = getattr(one, "help", None) or ""
            yield f"| {words} | {_cell(meaning)}{link if '.' in one.name else ''} |"


def _all_settings() -> Iterator[str]:
    defaults = flatten(Config())
    for section, options in SECTIONS.items():
        if section == "method":
            continue
        yield f"\n## {section}\n\n{options.__doc__}\n"
        yield "| setting | flag | default | meaning |\n|---|---|---|---|"
        for key, field in options.__pydantic_fields__.items():
            name = f"{section}.{key}"
            flag = next(filter(None, (flag_of(name, command) for command in COMMANDS)), "")
            default = _cell(in_yaml(defaults[name]))
            shown = (f"`{flag}`" if flag else "", f"`{default}`")
            yield f"| `{name}` | {' | '.join(shown)} | {_cell(field.description)} |"


def _cell(text: str) -> str:
    """Text in one cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")
