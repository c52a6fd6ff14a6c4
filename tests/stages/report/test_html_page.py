"""Nothing that a page is given is taken for HTML, and nothing secret stands in it."""

import pytest
from jinja2 import UndefinedError

from align.schemas.safe_text import MASK
from align.stages.report.html_page import render_page

EVIL = "<script>alert('&')</script>"
SAFE = "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;"
SWEEP = {
    "title": EVIL,
    "notes": [EVIL, "at https://me:word@host/ \x1b[2J"],
    "head": [EVIL, "loss"],
    "rows": [[EVIL, "1"]],
    "links": {EVIL: 'x" onclick="y'},
    "held_out": "",
    "learned": "<svg/>",
}


def test_text_is_never_html_and_shows_no_secret_and_a_chart_stands_as_it_was_drawn():
    text = render_page("sweep.html.j2", **SWEEP)
    assert "<script" not in text
    assert text.count(SAFE) >= 4
    assert f'<a href="x&#34; onclick=&#34;y">{SAFE}</a>' in text
    assert f"https://{MASK}@host/ \\u001b[2J" in text
    assert "<svg/>" in text


def test_a_value_that_is_missing_is_an_error():
    given = {key: value for key, value in SWEEP.items() if key != "learned"}
    with pytest.raises(UndefinedError, match="learned"):
        render_page("sweep.html.j2", **given)
