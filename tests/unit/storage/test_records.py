"""Records and lines on a disk: whole after a kill, one of many writers, loud where damaged."""

from contextlib import closing
from dataclasses import dataclass

import pytest

from align.schemas.errors import AlignError, CorruptionError, StorageError
from align.schemas.json_codec import to_signed_json
from align.stages.storage.disk.lines import Lines, keep_lines, read_lines
from align.stages.storage.records import Records
from support.at_once import at_the_same_time
from support.flips import flipped
from support.made_caches import states_of_kills
from support.refusals import refuses


@dataclass(frozen=True)
class Plain:
    number: int
    names: tuple[str, ...] = ()


PLAIN = Records(Plain, remedy="Remove it.")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "records").mkdir()
    return tmp_path / "records"


def test_of_writers_at_once_one_wins_and_all_see_its_record(folder):
    path, told = folder / "one.json", {}

    def put(writer):
        ours = Plain(writer)
        told[writer] = (ours, PLAIN.put(path, ours))

    at_the_same_time(put)
    kept = PLAIN.read(path)
    assert {counts for _, counts in told.values()} == {kept}
    assert [ours for ours, counts in told.values() if counts is ours] == [kept]


def test_a_record_is_found_and_dropped(folder):
    path = folder / "1.json"
    assert PLAIN.find(path) is None
    with pytest.raises(AlignError):
        PLAIN.read(path)
    assert PLAIN.put(path, Plain(1, ("a",))) == PLAIN.find(path) == Plain(1, ("a",))
    assert PLAIN.put(path, Plain(2)) == Plain(1, ("a",))
    PLAIN.drop(path)
    PLAIN.drop(path)  # which is none
    assert PLAIN.find(path) is None


def test_damage_is_loud_with_the_file_and_the_remedy(folder):
    path = folder / "one.json"
    good = to_signed_json(Plain(1, ("a", "b"))).encode()
    for damaged in (*flipped(good), b"", good[:-1], good + b"\n"):
        path.write_bytes(damaged)
        with refuses(CorruptionError, path, PLAIN.remedy):
            PLAIN.read(path)
    path.write_bytes(good)
    assert PLAIN.find(path) == Plain(1, ("a", "b"))


@pytest.mark.parametrize("operation", ["put", "replace", "drop"])
def test_a_kill_leaves_the_old_record_or_the_new_one(tmp_path, operation):
    path, old, new = tmp_path / "one.json", Plain(1), Plain(2)
    before, after = {"put": (None, new), "replace": (old, new), "drop": (old, None)}[operation]
    work = {
        "put": lambda: PLAIN.put(path, new),
        "replace": lambda: PLAIN.replace(path, new),
        "drop": lambda: PLAIN.drop(path),
    }[operation]

    def prepare():
        path.unlink(missing_ok=True)
        if before:
            PLAIN.replace(path, before)

    def look():
        found = PLAIN.find(path)
        work()
        assert PLAIN.find(path) == after
        return found

    assert states_of_kills(prepare, work, look) == [before, after]


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
