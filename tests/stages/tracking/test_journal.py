import json

import pytest

from align.schemas.errors import StorageError
from align.stages.storage import failpoints
from align.stages.tracking.journal import MetricPoint, line_start, open_journal, read_entries

NAN, INFINITY = float("nan"), float("inf")


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


def without_times(path):
    return [{k: v for k, v in line.items() if k != "time"} for line in lines(path)]


def test_a_line_holds_a_step_and_is_there_as_soon_as_it_is_logged(path):
    journal = open_journal(path, keep_through=-1)
    journal.append({"loss": 0.25, "eval/loss": 1.0}, step=1)
    assert without_times(path) == [{"step": 1, "loss": 0.25, "eval/loss": 1.0}]
    journal.append({"loss": 0.5}, step=2)
    first, second = lines(path)
    assert (second["step"], second["loss"]) == (2, 0.5)
    assert 1.7e9 < first["time"] <= second["time"]
    journal.close()


def test_what_is_not_finite_is_left_out(path):
    journal = open_journal(path, keep_through=-1)
    journal.append({"a": NAN, "b": INFINITY, "c": -INFINITY, "d": 1.0}, step=1)
    journal.append({"a": NAN}, step=2)
    journal.close()
    assert without_times(path) == [{"step": 1, "d": 1.0}, {"step": 2}]


def test_names_are_those_of_mlflow(path):
    journal = open_journal(path, keep_through=-1)
    journal.append({"odd@name": 1.0, "a//b": 2.0}, step=1)
    journal.close()
    assert without_times(path) == [{"step": 1, "odd_name": 1.0, "a/b": 2.0}]


def test_after_a_resume_the_file_is_that_of_an_uninterrupted_run(path, tmp_path):
    write(path, range(1, 8))
    write(path, range(5, 11), keep_through=4)
    write(tmp_path / "straight.jsonl", range(1, 11))
    assert without_times(path) == without_times(tmp_path / "straight.jsonl")


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
    assert [line["step"] for line in lines(path)] == left
    assert again.dropped == 4 - len(left)


def test_what_was_kept_keeps_its_bytes(path):
    write(path, range(1, 8))
    before = path.read_bytes().splitlines()
    write(path, [], keep_through=4)
    assert path.read_bytes().splitlines() == before[:4]


def test_a_torn_last_line_is_dropped(path):
    write(path, range(1, 4))
    whole = path.read_bytes()
    for cut in range(1, 40, 3):
        path.write_bytes(whole[:-cut])
        write(path, [3], keep_through=3)
        assert [line["step"] for line in lines(path)] == [1, 2, 3], cut


def test_a_new_run_drops_everything(path):
    write(path, [0, 1])
    write(path, [0])
    assert [line["step"] for line in lines(path)] == [0]


@pytest.mark.parametrize("junk", [b"\xa5\xa5", b"[]", b'{"step":"x","time":1}', b'{"step":1}', b""])
def test_lines_nobody_can_read_are_dropped_and_told(path, junk, caplog):
    write(path, [1, 2])
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, junk, second, b""]))
    write(path, [3], keep_through=2)
    assert [line["step"] for line in lines(path)] == [1, 2, 3]
    assert "1 lines cannot be read" in caplog.text


def test_entries_are_read_from_any_line_on(path):
    write(path, [1, 2, 3])
    (first,) = read_entries(path, 0, max_points=1)
    assert first.points[0] == MetricPoint("loss", 0.25, 1, round(lines(path)[0]["time"] * 1000))
    rest = read_entries(path, first.end, max_points=100)
    assert [entry.step for entry in rest] == [2, 3]
    assert rest[-1].end == path.stat().st_size
    assert read_entries(path, rest[-1].end, max_points=100) == []


def test_a_line_that_is_not_finished_is_not_read(path):
    write(path, [1])
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"step":2,"ti')
    (only,) = read_entries(path, 0, max_points=100)
    assert only.end == whole


def test_a_place_inside_a_line_means_the_beginning(path):
    write(path, [1, 2])
    end = read_entries(path, 0, max_points=1)[0].end
    assert [line_start(path, place) for place in (end, end - 1, 10**9, -1)] == [end, 0, 0, 0]


def test_a_full_disk_is_told_as_such(path):
    journal = open_journal(path, keep_through=-1)

    def full(op):
        if op.name == "write":
            raise OSError(28, "No space left on device")

    with failpoints.watch(full), pytest.raises(StorageError, match="Free some space"):
        journal.append({"a": 1.0}, step=1)


def test_lines_survive_a_power_loss_once_they_are_synced(path):
    seen = []
    with failpoints.watch(lambda op: seen.append((op.name, op.path.name))):
        journal = open_journal(path, keep_through=-1)
        journal.append({"a": 1.0}, step=1)
        journal.sync()
        journal.close()
    assert [name for name, _ in seen] == ["append", "write", "fsync", "fsync_folder"]
