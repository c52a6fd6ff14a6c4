"""Answers side by side: read back as they were written, and harmless whatever they say."""

import html
import re

import pytest
from markdown_it import MarkdownIt

from align.schemas.errors import CorruptionError
from align.stages.report.html_page import render_markdown
from align.stages.report.side_by_side import Answered, answers_jsonl, read_answers
from align.stages.report.signs import Sign, Signs

HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></td></table><img src=x onerror=alert(1)>",
    "![see](https://example.com/a.png) [here](https://example.com)",
    "a\n\n# A heading\n\n| a | b |\n| --- | --- |\n\n- one\n1. two\n> three",
    "`code` *bold* __bold__ ~~gone~~ &lt; \\ @everyone",
    "+ # - a line that begins a list",
)


def answered(text):
    return Answered("abcdef", text, text, text, before_ended=True, after_ended=False)


def test_answers_are_read_back_and_what_is_no_answer_is_refused(tmp_path):
    path, answers = tmp_path / "answers.jsonl", tuple(map(answered, HOSTILE))
    path.write_bytes(answers_jsonl(answers))
    assert read_answers(path) == answers
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(CorruptionError, match="is damaged"):
        read_answers(path)


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_any_text_and_takes_none_for_markup(text):
    signs = Signs((Sign(text, text, text),), (), ())
    told = {"title": text, "sentences": [text], "trouble": [text], "measured": [[text] * 3]}
    page = render_markdown("run.md.j2", **told, signs=signs, answers=[answered(text)])
    shown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(page)
    ours = "h2 p table thead tbody tr th td ul li strong details summary pre".split()  # noqa: SIM905
    assert {*re.findall(r"<([a-z0-9]+)", shown)} <= {*ours}
    assert shown.count("<table>") == 2  # what was measured, and the answers
    assert "@everyone" not in html.unescape(shown)
    visible = " ".join(html.unescape(re.sub(r"<[^>]*>", "", shown)).replace("\u200b", "").split())
    assert visible.count(" ".join(text.split())) == 1 + 1 + 1 + 3 + 3 + 1 + 3
