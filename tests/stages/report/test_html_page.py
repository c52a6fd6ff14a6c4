"""Nothing that a page is given is taken for HTML, and nothing secret stands in it."""

import pytest
from jinja2 import UndefinedError

from align.schemas.safe_text import MASK
from align.stages.report.html_page import render_page

SWEEP = {
    "title": "t",
    "notes": ["n"],
    "head": ["run", "loss"],
    "rows": [["a", "1"]],
    "links": {},
    "held_out": "",
    "learned": "<svg/>",
}


def sweep_page(**changed):
    return render_page("sweep.html.j2", **SWEEP | changed)


@pytest.mark.parametrize("place", ["title", "notes", "head", "rows"])
def test_text_is_never_html(place):
    evil = "<script>alert('&')</script>"
    given = {"title": evil, "notes": [evil], "head": [evil, "x"], "rows": [[evil, "1"]]}[place]
    text = sweep_page(**{place: given})
    assert "<script>" not in text
    assert "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;" in text


def test_a_link_cannot_end_its_attribute():
    text = sweep_page(links={"a": 'x" onclick="y'})
    assert '<a href="x&#34; onclick=&#34;y">a</a>' in text


def test_secrets_and_control_characters_are_not_shown():
    text = sweep_page(notes=["at https://me:word@host/ \x1b[2J"])
    assert f"https://{MASK}@host/ \\u001b[2J" in text


def test_charts_stand_as_they_were_drawn_and_an_empty_section_nowhere():
    text = sweep_page()
    assert '<div class="grid"><svg/></div>' in text
    assert "Training steps" in text
    assert "Held-out rows" not in text


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(UndefinedError, match="learned"):
        render_page(
            "sweep.html.j2", **{key: value for key, value in SWEEP.items() if key != "learned"}
        )
