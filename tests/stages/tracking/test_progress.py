"""What a person, a log or nobody sees of the work."""

import io

import pytest

from align.stages.tracking import progress as progress_module
from align.stages.tracking.progress import TaskProgress, make_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Ascii(io.StringIO):
    encoding = "ascii"


class Gone(Terminal):
    def write(self, _text):
        raise OSError(5, "Input/output error")


@pytest.fixture(autouse=True)
def _every_frame(monkeypatch):
    """Each step is drawn, on a terminal that can draw."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_module, "SECONDS_PER_FRAME", 0.0)


def test_a_task_is_two_lines():
    stream = io.StringIO()
    progress = make_progress(stream)
    progress.begin("scoring", total=2000, unit="rows")
    for _ in range(2000):
        progress.advance(1, tokens=4, padding=1)
    progress.end()
    first, last = stream.getvalue().splitlines()
    assert first == "scoring: 2,000 rows"
    assert last.endswith(" tokens/s, 25.0% padding")


def test_what_is_left_follows_from_what_is_done(monkeypatch):
    meter = TaskProgress("scoring", 100, "rows", started=0.0)
    monkeypatch.setattr("align.stages.tracking.progress.time.monotonic", lambda: 30.0)
    meter.add(25, tokens=3000, padding=300)
    # 25 rows in 30 s, so 75 more in 90 s; 3000 tokens in 30 s.
    expected = "scoring: 25 of 100 rows (25%), 100 tokens/s, 10.0% padding, 0:01:30 left"
    assert meter.so_far() == expected
    assert meter.closing().startswith("scoring: 25 of 100 rows (25%) in 0:00:30")


def test_a_terminal_that_can_draw_shows_a_bar_and_keeps_one_line():
    stream = Terminal()
    progress = make_progress(stream)
    progress.begin("scoring", total=2000, unit="rows")
    progress.advance(500, tokens=800, padding=100)
    assert "500 of 2,000 rows (25%)" in stream.getvalue()
    progress.say("[bold]found 3 rows[/bold]")
    progress.advance(1500)
    progress.end()
    assert "[bold]found 3 rows[/bold]" in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].split("\x1b[2K")[-1].startswith("scoring: 2,000 rows")


def test_text_from_data_cannot_steer_the_terminal_or_break_its_encoding_or_tell_a_secret():
    for stream in (Terminal(), io.StringIO()):
        make_progress(stream).say("a\x1b[31mb\nc\rd\u202e\x07 http://me:word@host")
        assert stream.getvalue() == "a\\u001b[31mb c\\rd\\u202e\\u0007 http://***@host\n"
    narrow = Ascii()
    make_progress(narrow).say("größe")
    assert narrow.getvalue() == "gr\\xf6\\xdfe\n"


def test_a_reader_who_left_does_not_stop_the_work():
    progress = make_progress(Gone())
    progress.begin("scoring", total=2, unit="rows")
    progress.advance(2)
    progress.say("still here")
    progress.end()
