"""A run's numbers as lines of a file, and what a person or a log sees of the work."""

import io
import json
import math

import pytest

from align.stages.tracking import progress as progress_module
from align.stages.tracking.metrics_log import MetricsLog, kept_lines, key_of, read_metrics
from align.stages.tracking.progress import Progress
from support import disk_faults


@pytest.fixture(name="path")
def _path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, *, keep_through=-1):
    log = MetricsLog(path, kept_lines(path, keep_through=keep_through)[0])
    for step in steps:
        log.append({"loss": step / 4, "eval/loss": 1.0}, step=step)
    log.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path):
    return [line["step"] for line in lines(path)]


def without_times(path):
    return [{k: v for k, v in line.items() if k != "time"} for line in lines(path)]


def test_a_line_is_there_as_soon_as_it_is_logged_without_what_is_not_finite(path):
    log = MetricsLog(path)
    log.append({"loss": 0.25, "odd@name": 1.0, "a//b": 2.0}, step=1)
    assert without_times(path) == [{"step": 1, "loss": 0.25, "odd_name": 1.0, "a/b": 2.0}]
    log.append({"a": math.nan, "b": math.inf, "c": -math.inf}, step=2)
    first, second = lines(path)
    assert second.keys() == {"step", "time"}
    assert 1.7e9 < first["time"] <= second["time"]
    log.close()


def test_a_resume_keeps_the_bytes_through_its_step_and_a_new_run_none(path, tmp_path):
    write(path, range(1, 8))
    before = path.read_bytes().splitlines()
    write(path, range(5, 11), keep_through=4)
    write(tmp_path / "straight.jsonl", range(1, 11))
    assert without_times(path) == without_times(tmp_path / "straight.jsonl")
    assert path.read_bytes().splitlines()[:4] == before[:4]
    write(path, [0])
    assert steps(path) == [0]


@pytest.mark.parametrize(("is_evaluated", "left"), [(True, [2, 3, 3]), (False, [2, 3])])
def test_an_evaluation_its_checkpoint_does_not_know_is_dropped(path, is_evaluated, left):
    log = MetricsLog(path)
    for step in (2, 3, 4):
        log.append({"loss": 1.0}, step=step)
        if step == 3:
            log.append({"eval/loss": 1.0}, step=step)
    log.close()
    kept, dropped = kept_lines(path, keep_through=3, is_evaluated=is_evaluated)
    MetricsLog(path, kept).close()
    assert steps(path) == left
    assert dropped == 4 - len(left)


def test_a_torn_last_line_is_dropped(path):
    write(path, range(1, 4))
    whole = path.read_bytes()
    for cut in range(1, 40, 3):
        path.write_bytes(whole[:-cut])
        write(path, [3], keep_through=3)
        assert steps(path) == [1, 2, 3], cut


JUNK = (b"\xa5\xa5", b"[]", b'{"step":"x","time":1}', b'{"step":1}', b"")


@pytest.mark.parametrize("junk", JUNK)
def test_lines_nobody_can_read_are_dropped_with_a_warning(path, junk, caplog):
    write(path, [1, 2])
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, junk, second, b""]))
    assert [line.step for line in read_metrics(path)] == [1, 2]
    assert caplog.text.count("1 lines") == 1
    write(path, [3], keep_through=2)
    assert steps(path) == [1, 2, 3]
    assert caplog.text.count("1 lines") == 2


def test_lines_are_read_from_any_whole_line_on(path):
    write(path, [1, 2, 3])
    first = next(read_metrics(path))
    assert first.metrics == {"loss": 0.25, "eval/loss": 1.0}
    assert (first.step, first.time, first.is_eval) == (1, lines(path)[0]["time"], True)
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"step":4,"ti')
    rest = [*read_metrics(path, first.end)]
    assert [line.step for line in rest] == [2, 3]
    assert rest[-1].end == whole


def test_lines_survive_a_power_loss_once_they_are_synced(path):
    seen = []
    with disk_faults.watch(lambda op: seen.append(op.name)):
        log = MetricsLog(path)
        log.append({"a": 1.0}, step=1)
        log.sync()
        log.close()
    assert seen == ["fsync", "fsync_folder"]


def test_names_and_values_are_what_mlflow_accepts():
    keys = {"tokens.max_length": "tokens.max_length", "loss@1:2": "loss_1_2", "größe": "gr__e"}
    for name, key in {**keys, "/a//../b/./c/": "a/b/c", "": "_", "..": "_"}.items():
        assert key_of(name) == key
    assert len(key_of("k" * 999)) == 250


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


def test_what_is_left_follows_from_what_is_done(monkeypatch):
    clock = "align.stages.tracking.progress.time.monotonic"
    monkeypatch.setattr(clock, lambda: 0.0)
    stream = io.StringIO()
    progress = Progress(stream)
    progress.begin("scoring", total=100, unit="rows")
    monkeypatch.setattr(clock, lambda: 30.0)
    progress.advance(25, tokens=3000, padding=300)
    progress.end()
    # 25 rows in 30 s, so 75 more in 90 s; 3000 tokens in 30 s.
    assert stream.getvalue().splitlines() == [
        "scoring: 100 rows",
        "scoring: 25 of 100 rows (25%), 100 tokens/s, 10.0% padding, 0:01:30 left",
        "scoring: 25 of 100 rows (25%) in 0:00:30, 100 tokens/s, 10.0% padding",
    ]


def test_a_signal_handler_writes_past_what_it_interrupted(tmp_path):
    with (tmp_path / "log").open("w") as stream:
        stream.write("half a")
        progress = Progress(stream)
        progress.log_in_handler("signal 2")
    progress.log_in_handler("signal 2")  # a closed stream, and one that is no file
    Progress(io.StringIO()).log_in_handler("signal 2")
    assert (tmp_path / "log").read_text() == "signal 2\nhalf a"


def test_text_from_data_cannot_steer_the_terminal_or_break_its_encoding_or_tell_a_secret():
    for stream in (Terminal(), io.StringIO()):
        Progress(stream).log("a\x1b[31mb\nc\rd\u202e\x07 http://me:word@host")
        assert stream.getvalue() == "a\\u001b[31mb c\\rd\\u202e\\u0007 http://***@host\n"
    narrow = Ascii()
    Progress(narrow).log("größe")
    assert narrow.getvalue() == "gr\\xf6\\xdfe\n"


def test_a_reader_who_left_does_not_stop_the_work():
    progress = Progress(Gone())
    progress.begin("scoring", total=2, unit="rows")
    progress.advance(2)
    progress.log("still here")
    progress.end()
