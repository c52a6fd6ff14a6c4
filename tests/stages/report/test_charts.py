"""Charts are drawn where their numbers say, and nothing else stands in them."""

import math
from xml.etree import ElementTree

import pytest

from align.stages.report.charts import MOST_POINTS, Series, Values, chart, histogram, plain


def drawn(figure):
    """The figure as XML; it has to be well formed."""
    return ElementTree.fromstring(figure)


def points_of(shape):
    return [tuple(map(float, pair.split(","))) for pair in shape.get("points").split()]


def only(figure, name):
    (found,) = drawn(figure).iter(name)
    return found


def test_a_line_runs_from_edge_to_edge():
    """Between 62 and 506 across; of 0 to 10 with a twentieth of room, 10 to 194 from the top."""
    figure = chart("Loss", [Series("loss", [(0, 0.0), (5, 10.0), (10, 5.0)], "c0")], x_label="step")
    found = points_of(only(figure, "polyline"))
    room = 184 * 0.5 / 11
    assert found == [
        (62, pytest.approx(194 - room, abs=0.1)),
        (284, pytest.approx(10 + room, abs=0.1)),
        (506, pytest.approx(102, abs=0.1)),
    ]


def test_ticks_are_round_numbers_inside():
    figure = chart("Loss", [Series("loss", [(0, 0.13), (29, 0.69)], "c0")], x_label="step")
    told = [text.text for text in drawn(figure).iter("text")]
    assert told == ["0.2", "0.4", "0.6", "0", "10", "20", "step"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.69305, 0.69314], ["0.69306", "0.69308", "0.69310", "0.69312", "0.69314"]),
        ([0.0, 1e-3], ["0", "0.0005", "0.0010"]),
        ([0.0, 5e-7], ["0", "2e-7", "4e-7"]),
        ([1.20e6, 1.28e6], ["1.2e6", "1.22e6", "1.24e6", "1.26e6", "1.28e6"]),
        ([900.0, 2100.0], ["1,000", "1,500", "2,000"]),
    ],
)
def test_no_two_ticks_are_called_alike(values, said):
    figure = chart("x", [Series("x", list(enumerate(values)), "c0")], x_label="step")
    told = [text.text for text in drawn(figure).iter("text") if text.get("class") == "y-tick"]
    assert told == said


def test_a_single_step_stands_in_the_middle_of_whole_steps():
    figure = chart("x", [Series("x", [(7, 0.5)], "c0", form="dots")], x_label="step")
    told = [text.text for text in drawn(figure).iter("text") if text.get("class") == "x-tick"]
    assert told == ["6.0", "6.5", "7.0", "7.5", "8.0", "step"]
    assert float(only(figure, "circle").get("cx")) == 284


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e305, -math.inf])
def test_what_cannot_be_drawn_is_left_out(value):
    figure = chart("x", [Series("x", [(0, 1.0), (1, value), (2, 3.0)], "c0")], x_label="step")
    assert len(points_of(only(figure, "polyline"))) == 2
    assert chart("x", [Series("x", [(1, value)], "c0")], x_label="step") == ""
    assert histogram("x", [Values("x", [value], "c0")], x_label="nats") == ""


@pytest.mark.parametrize("value", [0.0, 3.0, -2e-9, 1e9])
@pytest.mark.parametrize("count", [1, 3])
def test_what_never_changes_is_a_line_in_the_middle(value, count):
    series = Series("lr", [(step, value) for step in range(count)], "c0", form="dots")
    heights = {y for _, y in points_of(only(chart("lr", [series], x_label="step"), "polyline"))}
    assert len(heights) == 1
    assert 10 < heights.pop() < 194


def test_a_peak_among_many_steps_is_kept():
    points = [(step, 1.0 + step / 1e5) for step in range(10_000)]
    points[4321] = (4321, 50.0)
    points[8765] = (8765, -7.0)
    figure = chart("norm", [Series("norm", points, "c0")], x_label="step")
    heights = [y for _, y in points_of(only(figure, "polyline"))]
    assert len(heights) <= MOST_POINTS
    assert min(heights) == pytest.approx(10 + 184 * 2.85 / 62.7, abs=0.1)
    assert max(heights) == pytest.approx(194 - 184 * 2.85 / 62.7, abs=0.1)


def test_an_odd_number_of_many_points_loses_none_of_its_ends():
    points = [(float(step), float(step)) for step in range(999)]
    found = points_of(only(chart("x", [Series("x", points, "c0")], x_label="step"), "polyline"))
    assert (found[0][0], found[-1][0]) == (62, 506)


def test_a_histogram_counts_every_value_once():
    values = [0.0] * 5 + [1.0] * 3 + [0.4]
    figure = histogram("ratios", [Values("chosen", values, "c0")], x_label="nats")
    shape = points_of(only(figure, "polygon"))
    tops = [shape[index][1] for index in range(1, len(shape) - 1, 2)]
    floor, unit = 194, 184 / (5 * 1.05)
    counts = [round((floor - top) / unit) for top in tops]
    assert sum(counts) == len(values)
    assert sorted(filter(None, counts)) == [1, 3, 5]


def test_a_cloud_is_as_many_points_as_there_are():
    points = [(10.0, -1.0), (20.0, -2.0), (20.0, -2.0)]
    figure = chart("by length", [Series("chosen", points, "c0", form="cloud")], x_label="tokens")
    assert len(list(drawn(figure).iter("circle"))) == 3
    assert not list(drawn(figure).iter("polyline"))


def test_nothing_to_draw_is_nothing():
    assert chart("x", [Series("x", [], "c0")], x_label="step") == ""
    assert histogram("x", [Values("x", [], "c0")], x_label="nats") == ""


def test_names_cannot_become_markup():
    nasty = '"><script>alert(1)</script>'
    series = [Series(nasty, [(0, 1.0), (1, 2.0)], "c0", form="dots")]
    for figure in (
        chart(nasty, series, x_label=nasty, y_label=nasty),
        histogram(nasty, [Values(nasty, [1.0, 2.0], "c0")], x_label=nasty),
    ):
        assert not list(drawn(figure).iter("script"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (0.69314718, "0.6931"),
        (12345.6, "12,346"),
        (-3.5, "-3.5"),
        (5e-7, "5.0e-7"),
        (2.5e6, "2.5e6"),
        (999.96, "1,000"),
    ],
)
def test_numbers_are_short(value, said):
    assert plain(value) == said
