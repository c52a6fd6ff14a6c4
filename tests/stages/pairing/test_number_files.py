"""Numbers on disk read like an array, and writing them fails like any other write."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from align.stages.pairing.number_files import NumberFile


def test_what_is_put_is_read_by_place_by_slice_and_by_list(tmp_path):
    path = tmp_path / "numbers"
    with NumberFile(path, "<i8", length=10) as numbers:
        numbers[0:10] = np.zeros(10)
        numbers[2:5] = np.array([7, 8, 9])
        numbers[9] = -1
        numbers.forget()
        assert (len(numbers), numbers[4], numbers[9]) == (10, 9, -1)
        assert numbers[np.array([9, 2, 2])].tolist() == [-1, 7, 7]
    assert np.fromfile(path, dtype="<i8").tolist() == [0, 0, 7, 8, 9, 0, 0, 0, 0, -1]
    with NumberFile(path, "<i8") as again:
        assert again[2:5].tolist() == [7, 8, 9]


def test_no_numbers_are_no_trouble(tmp_path):
    with NumberFile(tmp_path / "none", "<u8", length=0) as numbers:
        numbers[0:0] = np.empty(0)
        numbers.forget()
        assert (len(numbers), numbers[:].tolist()) == (0, [])


def test_a_file_made_anew_is_as_long_as_was_asked_for(tmp_path):
    (tmp_path / "old").write_bytes(b"\1" * 80)
    with NumberFile(tmp_path / "old", "<i8", length=4) as numbers:
        assert len(numbers) == 4
    assert (tmp_path / "old").read_bytes() == bytes(32)


@pytest.mark.parametrize(
    ("place", "values"),
    [(10, 1), (-1, 1), (slice(8, 11), [1, 2, 3]), (slice(0, 2), [1, 2, 3]), (slice(3, 2), [])],
)
def test_what_does_not_fit_is_not_written(tmp_path, place, values):
    with (
        NumberFile(tmp_path / "numbers", "<i8", length=10) as numbers,
        pytest.raises(AssertionError),
    ):
        numbers[place] = values
    assert (tmp_path / "numbers").read_bytes() == bytes(80)


def test_what_was_written_is_durable_at_the_end_and_nothing_stays_open(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(file) or real(file))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with NumberFile(tmp_path / "numbers", "<i8", length=3) as numbers:
        numbers[0:3] = [1, 2, 3]
    with NumberFile(tmp_path / "numbers", "<i8"):
        pass
    assert len(synced) == 2  # the numbers and their checksums
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    assert len(numbers) == 0


def test_a_write_cut_short_is_gone_on_with(tmp_path, monkeypatch):
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, rest, place: whole(file, rest[:5], place))
    with NumberFile(tmp_path / "numbers", "<i8", length=3) as numbers:
        numbers[0:3] = [1, 2, 3]
    assert np.fromfile(tmp_path / "numbers", dtype="<i8").tolist() == [1, 2, 3]


def test_a_disk_that_is_full_is_an_error_and_not_a_signal(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(OSError, match="No space left"),
        NumberFile(tmp_path / "numbers", "<i8", length=3) as numbers,
    ):
        numbers[0] = 1
