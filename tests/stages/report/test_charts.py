"""Charts are drawn where their numbers say, and nothing else stands in them."""

import math
from xml.etree import ElementTree

import pytest

from align.stages.report.charts import MOST_POINTS, Series, Values, chart, histogram


class Drawn:
    """A figure, as somebody reads it by the numbers at its axes."""

    def __init__(self, figure):
        self.xml = ElementTree.fromstring(figure)  # it has to be well formed
        self._of_x, self._of_y = self._scale("x"), self._scale("y")

    def ticks(self, axis):
        """The numbers at an axis, as they are written."""
        return [mark.text for mark in self._marks(axis)]

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

    def _marks(self, axis):
        """The numbers at an axis; what they count stands behind them, elsewhere."""
        other = {"x": "y", "y": "x"}[axis]
        marks = [text for text in self.xml.iter("text") if text.get("class") == f"{axis}-tick"]
        return [mark for mark in marks if mark.get(other) == marks[0].get(other)]

    def _scale(self, axis):
        """What a place of the drawing means on an axis, by its first and its last number."""
        marks = self._marks(axis)
        places = [float(mark.get(axis)) for mark in marks]
        numbers = [float(mark.text.replace(",", "")) for mark in marks]
        each = (numbers[-1] - numbers[0]) / (places[-1] - places[0])
        return lambda place: numbers[0] + (place - places[0]) * each


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


def test_what_never_changes_is_a_flat_line_inside():
    """A single step is seen as well: a line of one point would not be."""
    for value in (0.0, 3.0, -2e-9, 1e9):
        for count in (1, 3):
            found = drawn([(step, value) for step in range(count)], form="dots").dots()
            assert [y for _, y in found] == pytest.approx([value] * count, rel=1e-6, abs=1e-9)


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
