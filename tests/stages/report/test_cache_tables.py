import dataclasses

import pytest

from align.schemas.cache import InputEntry
from align.stages.report.cache_summary import summarize
from align.stages.report.cache_tables import grid, render, share, size


@pytest.mark.parametrize("kind", ["paired", "unpaired", "scored"])
def test_every_section_is_there(kind, request):
    text = render(summarize(request.getfixturevalue(kind)))
    titles = [line.split()[1] for line in text.splitlines() if line.startswith("──")]
    assert titles == ["Cache", "Rows", "Lengths", "Truncation", "Balance", "Reference", "Drops"]
    assert ("nothing was cut" in text) == (kind != "paired")


def test_the_numbers_are_in_the_table(paired):
    lines = [line.split() for line in render(summarize(paired)).splitlines()]
    assert ["chosen", "1", "2", "4", "4", "4", "2"] in lines  # 1 2 3 4: p90 3.7, p99 3.97, rounded
    assert ["prompt", "1", "25.0%", "5", "31.2%"] in lines  # 5 of 5 + 11 tokens
    assert ["chosen", "-4.000", "-3.940", "-1.500", "-1.000", "-1.000", "-2.000"] in lines
    assert ["too_long", "2", "28.6%"] in lines  # 2 of 7 rows read


def test_large_numbers_have_separators(paired):
    summary = dataclasses.replace(summarize(paired), branches=12_345_678)
    assert "12,345,678" in render(summary)


def test_names_from_data_cannot_steer_the_terminal(paired):
    evil = InputEntry("a\x1b[2J\nb", 1, "00" * 32, 1)
    text = render(dataclasses.replace(summarize(paired), inputs=(evil,)))
    assert "\x1b" not in text
    assert "a[2Jb" in text


def test_what_ends_a_completion_is_said_with_who_writes_it(paired):
    lines = [line.split(maxsplit=3) for line in render(summarize(paired)).splitlines()]
    assert ["turns", "end", "with", "<|user|> (7), as the chat template writes it"] in lines
    assert ["tool", "calls", "with", "<|observation|> (8), as the chat template writes it"] in lines
    assert ["plain", "text", "with", "</s> (2), the EOS"] in lines


def test_wide_letters_take_two_columns():
    _, narrow, wide = grid(
        ("of 2 rows", "count"), [("abcdefghijklmn", "1"), ("日本語のデータ", "2")]
    )
    assert len(narrow) == len(wide) + 7  # letters of two columns each


def test_a_table_is_as_wide_as_it_needs_wherever_it_is_printed(monkeypatch):
    plain = grid(("run", "loss"), [("x" * 300, "[bold]0.5 :smile:")])
    assert plain[1] == f"  {'x' * 300}  [bold]0.5 :smile:"
    for name, value in {"COLUMNS": "40", "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert grid(("run", "loss"), [("x" * 300, "[bold]0.5 :smile:")]) == plain


def test_a_share_is_never_rounded_to_none_or_all():
    assert share(0, 10) == "0.0%"
    assert share(1, 10_000) == "<0.1%"
    assert share(9_999, 10_000) == ">99.9%"
    assert share(10, 10) == "100.0%"
    assert share(0, 0) == "-"


def test_sizes_are_decimal():
    assert [size(n) for n in (999, 1_000, 2_500_000)] == ["999 B", "1.0 kB", "2.5 MB"]
