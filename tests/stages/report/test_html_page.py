"""Nothing that a page or a card is given is taken for markup, and nothing secret stands in it."""

from dataclasses import fields

import pytest
from jinja2 import UndefinedError

from align.schemas.safe_text import MASK
from align.stages.report.html_page import render_page
from align.stages.report.model_card import Lineage, model_card

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


def test_the_card_of_a_model_shows_no_secret_and_its_tables_stay_tables():
    evil = "https://me:word@host/a|b\n# c"
    counts = {"steps": 1, "rows_seen": 1, "rows": 1, "metrics": {}, "method": "dpo"}
    tables = {name: {evil: evil} for name in ("options", "stops", "settings", "data", "versions")}
    texts = {field.name: evil for field in fields(Lineage)}
    lineage = Lineage(**texts | tables | counts)
    for card in (model_card(lineage), model_card(lineage, adapter_of=evil)):
        assert "word" not in card
        assert "\n# c" not in card
        assert f"| reference | https://{MASK}@host/a\\|b # c |" in card
