"""A run's numbers as lines of a file: what of them a resume keeps, and what is sent from them."""

import json

import pytest

from align.schemas.errors import StorageError
from align.stages.storage import failpoints
from align.stages.tracking.journal import (
    MetricPoint,
    key_of,
    line_start,
    open_journal,
    read_entries,
    shortened,
)


@pytest.fixture(name="path")
def _path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, *, keep_through=-1):
    journal = open_journal(path, keep_through=keep_through)
    for step in steps:
        journal.append({"loss": step / 4, "eval/loss": 1.0}, step=step)
    journal.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path):
    return [line["step"] for line in lines(path)]


def without_times(path):
    return [{k: v for k, v in line.items() if k != "time"} for line in lines(path)]


def test_a_line_is_there_as_soon_as_it_is_logged_without_what_is_not_finite(path):
    journal = open_journal(path, keep_through=-1)
    journal.append({"loss": 0.25, "odd@name": 1.0, "a//b": 2.0}, step=1)
    assert without_times(path) == [{"step": 1, "loss": 0.25, "odd_name": 1.0, "a/b": 2.0}]
    journal.append(dict(zip("abc", map(float, ("nan", "inf", "-inf")), strict=True)), step=2)
    first, second = lines(path)
    assert second.keys() == {"step", "time"}
    assert 1.7e9 < first["time"] <= second["time"]
    journal.close()


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
    journal = open_journal(path, keep_through=-1)
    for step in (2, 3, 4):
        journal.append({"loss": 1.0}, step=step)
        if step == 3:
            journal.append({"eval/loss": 1.0}, step=step)
    journal.close()
    again = open_journal(path, keep_through=3, is_evaluated=is_evaluated)
    again.close()
    assert steps(path) == left
    assert again.dropped == 4 - len(left)


def test_a_torn_last_line_is_dropped(path):
    write(path, range(1, 4))
    whole = path.read_bytes()
    for cut in range(1, 40, 3):
        path.write_bytes(whole[:-cut])
        write(path, [3], keep_through=3)
        assert steps(path) == [1, 2, 3], cut


@pytest.mark.parametrize("junk", [b"\xa5\xa5", b"[]", b'{"step":"x","time":1}', b'{"step":1}', b""])
def test_lines_nobody_can_read_are_dropped_and_told(path, junk, caplog):
    write(path, [1, 2])
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, junk, second, b""]))
    write(path, [3], keep_through=2)
    assert steps(path) == [1, 2, 3]
    assert "1 lines cannot be read" in caplog.text


def test_entries_are_read_from_any_whole_line_on(path):
    write(path, [1, 2, 3])
    (first,) = read_entries(path, 0, max_points=1)
    assert first.points[0] == MetricPoint("loss", 0.25, 1, round(lines(path)[0]["time"] * 1000))
    rest = read_entries(path, first.end, max_points=100)
    assert [entry.step for entry in rest] == [2, 3]
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"step":4,"ti')
    assert [entry.end for entry in read_entries(path, rest[0].end, max_points=100)] == [whole]
    # A place that is no line's beginning means the beginning of all.
    places = (first.end, first.end - 1, 10**9, -1)
    assert [line_start(path, place) for place in places] == [first.end, 0, 0, 0]


def test_a_full_disk_is_told_as_such(path):
    journal = open_journal(path, keep_through=-1)

    def full(op):
        if op.name == "write":
            raise OSError(28, "No space left on device")

    with failpoints.watch(full), pytest.raises(StorageError, match="Free some space"):
        journal.append({"a": 1.0}, step=1)


def test_lines_survive_a_power_loss_once_they_are_synced(path):
    seen = []
    with failpoints.watch(lambda op: seen.append(op.name)):
        journal = open_journal(path, keep_through=-1)
        journal.append({"a": 1.0}, step=1)
        journal.sync()
        journal.close()
    assert seen == ["append", "write", "fsync", "fsync_folder"]


def test_names_and_values_are_what_mlflow_accepts():
    keys = {"tokens.max_length": "tokens.max_length", "loss@1:2": "loss_1_2", "größe": "gr__e"}
    for name, key in {**keys, "/a//../b/./c/": "a/b/c", "": "_", "..": "_"}.items():
        assert key_of(name) == key
    assert len(key_of("k" * 999)) == 250
    assert (shortened("abcdef", 6), shortened("abcdefg", 6)) == ("abcdef", "abcde…")
