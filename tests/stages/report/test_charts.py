"""Charts stand where their numbers say; no page or card takes text for markup or shows a secret."""

import math
from dataclasses import fields
from xml.etree import ElementTree

import pytest

from align.schemas.safe_text import MASK
from align.stages.report.charts import MOST_POINTS, Series, Values, chart, histogram
from align.stages.report.html_page import render_page
from align.stages.report.model_card import Lineage, model_card


class Drawn:
    """A figure, as somebody reads it by the numbers at its axes."""

    def __init__(self, figure):
        self.xml = ElementTree.fromstring(figure)  # it has to be well formed
        self._of_x, self._of_y = self._scale("x"), self._scale("y")

    def points(self, name):
        """The corners of the only line or outline, as numbers of both axes."""
        (shape,) = self.xml.iter(name)
        pairs = [tuple(map(float, pair.split(","))) for pair in shape.get("points").split()]
        _, _, width, height = map(float, self.xml.find("svg").get("viewBox").split())
        assert all(0 <= x <= width and 0 <= y <= height for x, y in pairs)
        return [(self._of_x(x), self._of_y(y)) for x, y in pairs]

    def dots(self):
        """The same of all dots."""
        places = [(float(one.get("cx")), float(one.get("cy"))) for one in self.xml.iter("circle")]
        return [(self._of_x(x), self._of_y(y)) for x, y in places]

    def _scale(self, axis):
        """What a place of the drawing means on an axis, by its first and its last number."""
        other = {"x": "y", "y": "x"}[axis]
        marks = [text for text in self.xml.iter("text") if text.get("class") == f"{axis}-tick"]
        # What they count stands behind them, elsewhere.
        marks = [mark for mark in marks if mark.get(other) == marks[0].get(other)]
        first, last = (
            (float(m.get(axis)), float(m.text.replace(",", ""))) for m in marks[:: len(marks) - 1]
        )
        each = (last[1] - first[1]) / (last[0] - first[0])
        return lambda place: first[1] + (place - first[0]) * each


def drawn(points, **more):
    return Drawn(chart("Loss", [Series("loss", points, "c0", **more)], x_label="step"))


def near(points, *, by=0.02):
    return [(pytest.approx(x, abs=by), pytest.approx(y, abs=by)) for x, y in points]


@pytest.mark.parametrize("form", ["line", "dots", "cloud"])
def test_every_point_stands_where_its_numbers_say(form):
    points = [(0, 0.0), (5, 10.0), (7, -2.5), (7, -2.5), (10, 5.0)]
    figure = drawn(points, form=form)
    if form != "cloud":
        assert figure.points("polyline") == near(points, by=0.05)
    assert figure.dots() == ([] if form == "line" else near(points, by=0.05))


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e305, -math.inf])
def test_what_cannot_be_drawn_is_left_out(value):
    assert drawn([(0, 1.0), (1, value), (2, 3.0)]).points("polyline") == near([(0, 1), (2, 3)])
    for points in ([(1, value)], []):
        assert chart("x", [Series("x", points, "c0")], x_label="step") == ""
    for values in ([value], []):
        assert histogram("x", [Values("x", values, "c0")], x_label="nats") == ""


def test_a_peak_among_many_steps_is_kept():
    points = [(step, 1.0 + step / 1e5) for step in range(9_999)]
    points[4321] = (4321, 50.0)
    points[8765] = (8765, -7.0)
    found = drawn(points).points("polyline")
    assert len(found) <= MOST_POINTS
    for point in (points[0], points[4321], points[8765], points[-1]):
        assert any(
            abs(point[0] - x) < 20 and abs(point[1] - y) < 0.1  # a tenth of a dot
            for x, y in found
        )


def test_a_histogram_counts_every_value_once():
    values = [0.0] * 5 + [1.0] * 3 + [0.4]
    figure = Drawn(histogram("ratios", [Values("chosen", values, "c0")], x_label="nats"))
    corners = figure.points("polygon")
    left, right = corners[1:-1:2], corners[2:-1:2]
    bars = [(a, b, y) for (a, y), (b, _) in zip(left, right, strict=True) if y > 0.1]
    assert [round(count) for _, _, count in bars] == [5, 1, 3]
    for value, (low, high, _) in zip([0.0, 0.4, 1.0], bars, strict=True):
        assert low - 0.01 <= value <= high + 0.01


def test_names_cannot_become_markup():
    nasty = '"><script>alert(1)</script>'
    series = [Series(nasty, [(0, 1.0), (1, 2.0)], "c0", form="dots")]
    for figure in (
        chart(nasty, series, x_label=nasty, y_label=nasty),
        histogram(nasty, [Values(nasty, [1.0, 2.0], "c0")], x_label=nasty),
    ):
        assert not list(ElementTree.fromstring(figure).iter("script"))


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


def test_the_card_of_a_model_shows_no_secret_and_its_tables_stay_tables():
    evil = "https://me:word@host/a|b\n# c"
    counts = {"steps": 1, "rows_seen": 1, "rows": 1, "metrics": {}, "method": "dpo"}
    tables = {
        name: {evil: evil}
        for name in ("options", "stops", "settings", "data", "versions", "recorded")
    }
    texts = {field.name: evil for field in fields(Lineage)}
    lineage = Lineage(**texts | tables | counts)
    for card in (model_card(lineage), model_card(lineage, adapter_of=evil)):
        assert "word" not in card
        assert "\n# c" not in card
        assert f"| reference | https://{MASK}@host/a\\|b # c |" in card
