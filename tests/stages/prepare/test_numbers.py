"""Numbers on disk read like an array, and writing them fails like any other write."""

import errno
import os

import numpy as np
import pytest

from align.stages.prepare.numbers import NumberFile


def test_what_is_put_is_read_by_place_by_slice_and_by_list(tmp_path):
    path = tmp_path / "numbers"
    with NumberFile(path, "<i8", length=10) as numbers:
        assert numbers[:].tolist() == [0] * 10
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


def test_a_file_made_anew_holds_nothing_of_what_it_was(tmp_path):
    (tmp_path / "old").write_bytes(b"\1" * 80)
    with NumberFile(tmp_path / "old", "<i8", length=4) as numbers:
        assert numbers[:].tolist() == [0, 0, 0, 0]


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
