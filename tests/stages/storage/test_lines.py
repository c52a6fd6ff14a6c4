"""Lines at the end of a file: each is whole or not there, whoever is killed, whatever is torn."""

from contextlib import closing

import pytest

from align.schemas.errors import StorageError
from align.stages.storage.disk.lines import Lines, keep_lines, line_start, read_lines
from support.made_caches import states_of_kills

TEXTS = [b"first", b"", b"\xff\x00third" * 3000, b"last"]


@pytest.fixture(name="path")
def _path(tmp_path):
    path = tmp_path / "lines"
    with closing(Lines(path)) as lines:
        for text in TEXTS:
            lines.append(text)
    return path


def texts(path, start=0):
    return [line.text.removesuffix(b"\n") for line in read_lines(path, start)]


def test_what_is_appended_is_read_from_any_lines_beginning_on(path):
    starts = [0, *(line.end for line in read_lines(path))]
    assert [texts(path, start) for start in starts] == [TEXTS[number:] for number in range(5)]
    assert [line_start(path, start) for start in starts] == starts
    assert {line_start(path, wanted) for wanted in (-1, 1, starts[2] + 7, 10**9)} == {0}
    with pytest.raises(StorageError):
        next(read_lines(path.with_name("nothing")))


def test_a_torn_last_line_is_skipped_and_cut_away(path):
    whole = path.read_bytes()
    for cut in range(1, len(TEXTS[-1]) + 2):
        path.write_bytes(whole[:-cut])
        assert texts(path) == TEXTS[:-1]
    first, _, third = read_lines(path)
    keep_lines(path, [first, third])
    assert path.read_bytes() == b"first\n" + TEXTS[2] + b"\n"
    before = path.stat()
    keep_lines(path, [*read_lines(path)])  # all: nothing is written
    assert path.stat() == before
    with closing(Lines(path)) as lines:
        lines.append(b"again")
    assert texts(path) == [b"first", TEXTS[2], b"again"]


def test_a_kill_leaves_the_old_lines_or_the_new_ones(path):
    whole = path.read_bytes()
    first, *_ = read_lines(path)
    seen = states_of_kills(
        lambda: path.write_bytes(whole), lambda: keep_lines(path, [first]), lambda: texts(path)
    )
    assert seen == [TEXTS, [b"first"]]
