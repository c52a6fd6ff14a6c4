"""Charts stand where their numbers say; no page or card takes text for markup or shows a secret."""

import math
import re
from xml.etree import ElementTree

import pytest

from align.schemas.safe_text import MASK
from align.stages.report.charts import MARKED, MAX_POINTS, Series, chart, histogram
from align.stages.report.model_card import inline, model_card
from align.stages.report.page import Section, render_page
from align.stages.report.run_curves import LEARNING, curves_of


class Drawn:
    """A figure, as somebody reads it by the numbers at its axes."""

    def __init__(self, figure):
        self.xml = ElementTree.fromstring(figure)  # it has to be well formed
        self._of_x, self._of_y = self._scale("x"), self._scale("y")

    def points(self, name, kind=""):
        """The corners of the only line or outline of a kind, as numbers of both axes."""
        (shape,) = (one for one in self.xml.iter(name) if kind in one.get("class"))
        pairs = [tuple(map(float, pair.split(","))) for pair in shape.get("points").split()]
        _, _, width, height = map(float, self.xml.find("svg").get("viewBox").split())
        assert all(0 <= x <= width and 0 <= y <= height for x, y in pairs)
        return [(self._of_x(x), self._of_y(y)) for x, y in pairs]

    def dots(self, kind=""):
        """The same of all dots, or of those of a kind."""
        found = [one for one in self.xml.iterfind("svg/circle") if kind in one.get("class")]
        return [(self._of_x(float(o.get("cx"))), self._of_y(float(o.get("cy")))) for o in found]

    def ticks(self, axis):
        """The labels of an axis."""
        return [mark.text for mark in self._marks(axis)]

    def _scale(self, axis):
        """What a place of the drawing means on an axis, by its first and its last number."""
        marks = self._marks(axis)
        first, last = (
            (float(m.get(axis)), float(m.text.replace(",", ""))) for m in marks[:: len(marks) - 1]
        )
        each = (last[1] - first[1]) / (last[0] - first[0])
        return lambda place: first[1] + (place - first[0]) * each

    def _marks(self, axis):
        other = {"x": "y", "y": "x"}[axis]
        marks = [text for text in self.xml.iter("text") if text.get("class") == f"{axis}-tick"]
        # What they count stands behind them, elsewhere.
        return [mark for mark in marks if mark.get(other) == marks[0].get(other)]


def drawn(points, **more):
    return Drawn(chart("Loss", [Series("train", points, "c0", **more)], x_label="step"))


def near(points, *, by=0.02):
    return [(pytest.approx(x, abs=by), pytest.approx(y, abs=by)) for x, y in points]


@pytest.mark.parametrize("form", ["line", "dots", "cloud"])
def test_every_point_stands_where_its_numbers_say(form):
    points = [(0, 0.0), (5, 10.0), (7, -2.5), (7, -2.5), (10, 5.0)]
    figure = drawn(points, form=form)
    if form != "cloud":
        assert figure.points("polyline") == near(points, by=0.05)
    assert figure.dots() == near(points, by=0.05)  # so few that those of a line are marked too


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e305, -math.inf])
def test_what_cannot_be_drawn_is_left_out(value):
    assert drawn([(0, 1.0), (1, value), (2, 3.0)]).points("polyline") == near([(0, 1), (2, 3)])
    for points in ([(1, value)], []):
        assert chart("x", [Series("x", points, "c0")], x_label="step") == ""
    for values in ([value], []):
        assert histogram("x", [("x", values, "c0")], x_label="nats") == ""


def test_a_peak_among_many_steps_is_kept_and_no_point_of_a_long_line_is_marked():
    points = [(step, 1.0 + step / 1e5) for step in range(9_999)]
    points[4321] = (4321, 50.0)
    points[8765] = (8765, -7.0)
    figure = drawn(points)
    found = figure.points("polyline")
    assert len(found) <= MAX_POINTS
    for point in (points[0], points[4321], points[8765], points[-1]):
        assert any(
            abs(point[0] - x) < 20 and abs(point[1] - y) < 0.1  # a tenth of a dot
            for x, y in found
        )
    assert figure.dots() == drawn(points[: MARKED + 1]).dots() == []


def test_the_curve_of_many_noisy_lines_is_faint_under_the_mean_of_their_neighbours():
    """Of 60 lines the mean is over 5: in the middle of 0 1 0 1 0, at an end over the 3 there."""
    points = [(step, float(step % 2)) for step in range(60)]
    figure = drawn(points)
    assert figure.points("polyline", "faint") == near(points, by=0.05)
    smooth = [value for _, value in figure.points("polyline", "line")]
    assert smooth[:4] == [pytest.approx(one, abs=0.01) for one in (1 / 3, 0.5, 0.4, 0.6)]
    assert smooth[-1] == pytest.approx(2 / 3, abs=0.01)
    assert "mean of 5 lines" in "".join(figure.xml.itertext())
    for plain_course in (points[1:], [(x, x**2) for x, _ in points], [(x, 3.0) for x, _ in points]):
        assert drawn(plain_course).points("polyline", "line") == near(plain_course, by=5)


def test_the_best_of_enough_evaluations_has_a_ring():
    losses = [(0, 0.7), (10, 0.4), (20, 0.3), (30, 0.35)]
    accuracies = [(0, 0.5), (9, 0.9), (10, 0.8)]
    held_out = {"loss": losses, "rewards/accuracies": accuracies}
    for metric, best, ring in (
        ("loss", "eval/loss", (20, 0.3)),
        ("loss", "+eval/loss", (0, 0.7)),
        ("rewards/accuracies", "eval/rewards/accuracies", (9, 0.9)),
    ):
        figure = Drawn(curves_of({"title": (metric,)}, {}, {"": held_out}, best))
        assert figure.dots("ring") == near([ring])
    for name in ("loss", "eval/rewards/accuracies"):
        assert not Drawn(curves_of({"title": ("loss",)}, {}, {"": held_out}, name)).dots("ring")
    assert not Drawn(curves_of(LEARNING, {}, {"": {"loss": losses[:2]}}, "eval/loss")).dots("ring")
    both = {"a": {"loss": losses}, "b": {"loss": accuracies}}
    figure = Drawn(curves_of({"title": ("loss",)}, {}, both, "-eval/b/loss"))
    assert figure.dots("ring") == near([accuracies[0]])
    assert figure.dots("dots") == near([*losses, *accuracies])


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, ["0", "1"]),
        (0, 2, ["0", "1", "2"]),
        (0, 6, ["0", "2", "4", "6"]),
        (3, 3, ["2", "3", "4"]),
        (0, 1.5, ["0", "0.5", "1", "1.5"]),
        (0, 2e6, ["0", "500,000", "1,000,000", "1,500,000", "2,000,000"]),
        (0, 1.2e-6, ["0", "5e-07", "1e-06"]),
    ],
)
def test_ticks_are_round_and_distinct_and_steps_are_whole(low, high, ticks):
    assert drawn([(low, 1.0), (high, 2.0)]).ticks("x") == ticks


def test_a_histogram_counts_every_value_once():
    values = [0.0] * 5 + [1.0] * 3 + [0.4]
    figure = Drawn(histogram("ratios", [("chosen", values, "c0")], x_label="nats"))
    corners = figure.points("polygon")
    left, right = corners[1:-1:2], corners[2:-1:2]
    bars = [(a, b, y) for (a, y), (b, _) in zip(left, right, strict=True) if y > 0.1]
    assert [round(count) for _, _, count in bars] == [5, 1, 3]
    for value, (low, high, _) in zip([0.0, 0.4, 1.0], bars, strict=True):
        assert low - 0.01 <= value <= high + 0.01


EVIL = "<script>alert('&')</script>"
SAFE = "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;"


def test_text_is_never_html_and_shows_no_secret_and_a_chart_stands_as_it_was_drawn():
    series = [Series(EVIL, [(0, 1.0), (1, 2.0)], "c0", form="dots")]
    figures = (
        chart(EVIL, series, x_label=EVIL, y_label=EVIL),
        histogram(EVIL, [(EVIL, [1.0, 2.0], "c0")], x_label=EVIL),
    )
    sections = [
        Section(EVIL, note=EVIL, facts={EVIL: EVIL}, texts=[{EVIL: EVIL}], is_folded=True),
        Section("runs", table=[[EVIL, "loss"], [EVIL, "1"]], links={EVIL: 'x" onclick="y'}),
        Section("charts", figures="".join(figures)),
        Section("empty"),
    ]
    secret = "at https://me:word@host/ \x1b[2J"
    text = render_page(EVIL, sections, lead=[EVIL, secret], alert=[EVIL], facts={EVIL: EVIL})
    assert "<script" not in text
    assert text.count(SAFE) >= 14
    assert f'<a href="x&#34; onclick=&#34;y">{SAFE}</a>' in text
    assert f"https://{MASK}@host/ \\u001b[2J" in text
    assert all(figure in text and ElementTree.fromstring(figure) for figure in figures)
    assert "empty" not in text


def test_a_page_lets_a_browser_load_nothing():
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', render_page("a", []))
    rules = dict(rule.split(maxsplit=1) for rule in policy.split(";"))
    assert rules == {"default-src": "'none'", "style-src": "'unsafe-inline'"}


def test_the_card_of_a_model_shows_no_secret_and_its_tables_stay_tables():
    evil = "https://me:word@host/a|b\n# c"
    card = model_card({"library_name": "peft"}, [f"`{inline(evil)}`"], {"Data": {evil: evil}})
    assert "word" not in card
    assert "\n# c" not in card
    shown = f"https://{MASK}@host/a\\|b # c"
    assert f"| {shown} | {shown} |" in card
