"""The README and the pages of docs/ as tests read them."""

import re
import shlex
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt

from support.rooms import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "examples" / "README.md"])
_MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A block of code, and its language where it names one."""

    language: str
    text: str

    @property
    def lines(self):
        """What a shell would be given, one command each."""
        joined = self.text.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip()]


def page(name):
    """A page by its path in the repository."""
    return ROOT / name


def name_of(path):
    """The name of a page or example in a test's id."""
    return str(path.relative_to(ROOT))


def blocks(path, language=None):
    """Code that stands by itself, fenced or indented."""
    found = _blocks(_tokens(path))
    return [block for block in found if language in (None, block.language)]


def programs_under(path, heading):
    """The texts of a section's blocks that name their language."""
    _, _, rest = path.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    tokens = _MARKDOWN.parse(rest.partition("\n## ")[0])
    return [block.text for block in _blocks(tokens) if block.language]


def _blocks(tokens):
    found = (token for token in tokens if token.type in {"fence", "code_block"})
    return [Block(token.info.strip(), token.content) for token in found]


def codes(path):
    """Code in running text."""
    for token in _tokens(path):
        yield from (one.content for one in token.children or [] if one.type == "code_inline")


def links(path):
    """Where links and images point to."""
    for token in _tokens(path):
        for child in token.children or []:
            if target := child.attrGet("href") or child.attrGet("src"):
                yield target


def commands(path):
    """Every `align …` of the page's blocks as a list of words, whoever launches it."""
    for block in blocks(path):
        if block.language in {"", "sh"}:
            yield from filter(None, map(_command, block.lines))


def _command(line):
    """The words behind `align`; None for a line that does not call it."""
    if not re.search(r"(^|\s)align\s", line):
        return None
    launcher, *_ = words = shlex.split(line, comments=True)
    if "align" not in words or launcher == "make":
        return None
    assert launcher in {"align", "torchrun", "deepspeed", "srun", "uvx"}, line
    return words[words.index("align") + 1 :]


@cache
def _tokens(path):
    return _MARKDOWN.parse(path.read_text(encoding="utf-8"))
