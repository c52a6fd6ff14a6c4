"""Numbers in a file with checksums come back as they were written, or not at all."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.errors import CorruptionError
from align.stages.pairing.number_files import BLOCK_BYTES, Summed, SummedWriter, write_sums
from support.flips import flips

PER_BLOCK = BLOCK_BYTES // 8
NUMBERS = np.arange(0, 9 * PER_BLOCK, 3)  # three blocks
places = st.integers(0, len(NUMBERS))


@pytest.fixture(scope="module", name="column")
def _column(tmp_path_factory):
    return written(tmp_path_factory.mktemp("summed") / "numbers.bin")


def written(path, cuts=(5, PER_BLOCK, PER_BLOCK + 1)):
    with SummedWriter(path) as file:
        for start, stop in pairwise([0, *cuts, len(NUMBERS)]):
            file.write(NUMBERS[start:stop])
    return Summed(path, "<i8")


@given(places, places)
def test_any_range_is_read_back(column, one, other):
    start, stop = sorted((one, other))
    assert np.array_equal(column.read(start, stop), NUMBERS[start:stop])


@given(st.lists(st.integers(0, len(NUMBERS) - 1), max_size=9))
def test_numbers_at_any_places_are_read_back(column, chosen):
    at = np.array(chosen, dtype=np.int64)
    assert np.array_equal(column.at(at), NUMBERS[at])


@given(st.integers(-1, int(NUMBERS[-1]) + 1), st.sampled_from(["left", "right"]), places, places)
def test_a_search_finds_what_numpy_finds(column, value, side, one, other):
    start, stop = sorted((one, other))
    expected = start + np.searchsorted(NUMBERS[start:stop], value, side=side)
    assert column.search(value, side, start=start, stop=stop) == expected


@pytest.mark.parametrize("count", [0, 1, PER_BLOCK, 2 * PER_BLOCK])
def test_a_file_may_be_empty_or_end_with_a_block(tmp_path, count):
    with SummedWriter(tmp_path / "x.bin") as file:
        file.write(NUMBERS[:count])
    column = Summed(tmp_path / "x.bin", "<i8")
    assert len(column) == count
    assert np.array_equal(column.read(), NUMBERS[:count])
    sums = (tmp_path / "x.sums").read_bytes()
    write_sums(tmp_path / "x.bin")
    assert (tmp_path / "x.sums").read_bytes() == sums


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_no_flipped_bit_is_read(tmp_path, count):
    column = written(tmp_path / "x.bin")
    files = [column.path, column.path.with_suffix(".sums")]
    good = {file: file.read_bytes() for file in files}
    for file, byte, bit in flips({file: len(good[file]) for file in files}, count):
        damaged = bytearray(good[file])
        damaged[byte] ^= 1 << bit
        file.write_bytes(damaged)
        with pytest.raises(CorruptionError, match=r"x\.bin is damaged: .* Remove this file"):
            column.check()
        file.write_bytes(good[file])
    column.check()


@pytest.mark.parametrize("harm", ["short", "gone", "sums gone", "sums short"])
def test_a_file_that_is_not_whole_is_not_read(tmp_path, harm):
    column = written(tmp_path / "x.bin")
    path = tmp_path / ("x.sums" if "sums" in harm else "x.bin")
    if "gone" in harm:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match=r"x\.bin is damaged"):
        column.check()


def test_only_the_blocks_that_are_read_are_looked_at(tmp_path):
    column = written(tmp_path / "x.bin")
    damaged = bytearray(column.path.read_bytes())
    damaged[-1] ^= 1
    column.path.write_bytes(damaged)
    assert np.array_equal(column.read(0, PER_BLOCK), NUMBERS[:PER_BLOCK])
    with pytest.raises(CorruptionError):
        column.read(len(NUMBERS) - 1, len(NUMBERS))
