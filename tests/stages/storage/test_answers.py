"""Answers: durable once added, kept once, read whoever merges them."""

import hashlib
import itertools
import multiprocessing
import random
import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from align.schemas.errors import CorruptionError, StorageError
from align.stages.storage import answers as module
from align.stages.storage.answers import Answers
from align.stages.storage.disk.disk_store import DiskStore
from align.stages.storage.disk.failpoints import watch
from support.answer_folders import LIVES, STEPS, line, merges, merges_until, pays
from support.patience import PATIENCE

CHILDREN = multiprocessing.get_context("forkserver")


@pytest.fixture
def answers_folder(tmp_path):
    return tmp_path / "answers"


def added(answers_folder, **texts):
    Answers(answers_folder).add({key: {"text": text} for key, text in texts.items()})


def all_of(answers):
    return {key: answer["text"] for key, answer in answers.of("abcdefgh")}


DEAD = f".{'0' * 64}.jsonl.{'1' * 16}.tmp"


def segments(answers_folder):
    return sorted(answers_folder.glob("[!.]*"))


@pytest.fixture
def three_fill_one(monkeypatch):
    """Three lines of one letter make a segment that is not small."""
    monkeypatch.setattr(module, "MOST_SMALL", 0)
    monkeypatch.setattr(module, "SMALL_BYTES", 3 * len(line("a", "a")))


def test_an_answer_is_there_for_every_process_once_it_is_added(answers_folder):
    first, second = Answers(answers_folder), Answers(answers_folder)
    first.add({"a": {"text": "one"}, "b": {"text": "two"}})
    assert all_of(first) == {"a": "one", "b": "two"}
    assert "a" not in second
    second.look()
    assert all_of(second) == {"a": "one", "b": "two"} == all_of(Answers(answers_folder))
    assert second.missing(["c", "a", "d"]) == ["c", "d"]
    assert dict(second.of(["b", "x"])) == {"b": {"text": "two"}}
    assert len(second) == 2


def test_a_refusal_is_known_to_every_process_until_there_is_an_answer(answers_folder):
    Answers(answers_folder).add({"a": {"text": "one"}}, {"b": "too long"})
    other = Answers(answers_folder)
    assert other.refused("abc") == {"b": "too long"}
    assert other.missing("abc") == ["b", "c"]
    added(answers_folder, b="two")
    other.look()
    assert other.refused("abc") == {}
    assert all_of(other) == {"a": "one", "b": "two"}


def test_the_order_of_answers_is_of_no_account_and_of_two_the_smaller_line_counts(tmp_path):
    for order in ("xb", "bx"):
        for text, key in itertools.product(order, "abcdefgh"):
            added(tmp_path / order, **{key: text})
        assert all_of(Answers(tmp_path / order)) == dict.fromkeys("abcdefgh", "b")
    for order in ("ab", "ba", "ba"):
        added(tmp_path / "same", **{key: key for key in order})
    assert len(segments(tmp_path / "same")) == 1


def test_a_segment_is_named_by_its_bytes_and_a_damaged_one_is_refused(answers_folder):
    added(answers_folder, a="x")
    for name in ("own.jsonl", ".notes", DEAD):
        (answers_folder / name).write_text("half an ans")
    Answers(answers_folder).merge()
    assert not (answers_folder / DEAD).exists()  # the draft of a writer that was killed
    assert all_of(Answers(answers_folder)) == {"a": "x"}
    assert len([*answers_folder.iterdir()]) == 3
    segment, _ = segments(answers_folder)
    assert segment.name == f"{hashlib.sha256(segment.read_bytes()).hexdigest()}.jsonl"
    segment.write_bytes(segment.read_bytes().replace(b"x", b"y"))
    with pytest.raises(CorruptionError, match=f"{segment.name}.*run the same command again"):
        Answers(answers_folder)


def test_a_line_that_changed_since_it_was_read_is_refused(answers_folder):
    Answers(answers_folder).add({"a": {"text": "x"}, "b": {"text": "y"}})
    (segment,), answers = segments(answers_folder), Answers(answers_folder)
    whole = segment.read_bytes()
    assert whole == line("a", "x") + line("b", "y")
    for changed in (whole.replace(b"x", b'"'), line("b", "x") + line("a", "y"), whole[:20], b""):
        segment.write_bytes(changed)
        with pytest.raises(CorruptionError, match=f"{segment.name}.*run the same command again"):
            dict(answers.of("a"))
    segment.unlink()
    with pytest.raises(CorruptionError, match="answers that were there are gone"):
        dict(answers.of("a"))


def test_to_add_is_to_put_one_segment_and_to_read_or_remove_none(answers_folder, three_fill_one):
    answers = Answers(answers_folder)
    ops = []
    with watch(ops.append), mock.patch.object(DiskStore, "read", side_effect=AssertionError):
        for number in range(20):
            answers.add({str(number): {"text": "x"}})
    assert len(segments(answers_folder)) == 20
    assert Counter(op.name for op in ops)["link"] == 20
    assert {op.path.suffix for op in ops if op.name == "unlink"} == {".tmp"}


def test_small_segments_are_merged_once_they_fill_a_large_one(answers_folder, three_fill_one):
    assert all_of(Answers(answers_folder)) == {}
    for key in "ab":
        added(answers_folder, **{key: key})
    Answers(answers_folder).merge()
    assert len([*answers_folder.iterdir()]) == 2
    reader, writer = Answers(answers_folder), Answers(answers_folder)
    added(answers_folder, c="c", d="d")
    Answers(answers_folder).merge()
    (large,) = answers_folder.iterdir()
    assert dict(reader.of("ab")) == {key: {"text": key} for key in "ab"}
    assert all_of(reader) == {key: key for key in "abcd"} == all_of(Answers(answers_folder))
    assert dict(reader.of("abc")) == {key: {"text": key} for key in "abc"}
    writer.add({"a": {"text": "A"}, "e": {"text": "e"}})  # what it knew of a was merged away
    assert writer.missing("abcde") == ["c", "d"]
    whole = {key: key for key in "bcde"} | {"a": "A"}
    assert dict(writer.of("abe")) == {key: {"text": whole[key]} for key in "abe"}
    assert all_of(writer) == whole
    added(answers_folder, f="f")
    Answers(answers_folder).merge()
    assert large in {*answers_folder.iterdir()}  # it stays, whatever is merged
    assert len([*answers_folder.iterdir()]) == 2
    assert all_of(Answers(answers_folder)) == whole | {"f": "f"}


def test_what_is_merged_while_it_is_read_is_read_all_the_same(answers_folder, three_fill_one):
    for key in "abcd":
        added(answers_folder, **{key: key})
    readers = [Answers(answers_folder) for _ in range(3)]
    Answers(answers_folder).merge()
    assert dict(readers[0].of("d")) == {"d": {"text": "d"}}
    assert dict(readers[1].of("abcd")) == {key: {"text": key} for key in "abcd"}
    readers[2].merge()  # what another has merged
    assert len([*answers_folder.iterdir()]) == 1
    for reader in (*readers, Answers(answers_folder)):
        reader.look()
        assert all_of(reader) == {key: key for key in "abcd"}


@pytest.mark.parametrize("known", ["", "abcd"])
def test_a_listing_that_was_made_while_others_merged_hides_nothing(
    answers_folder, three_fill_one, known
):
    """It came too early for what was put, and too late for what was removed."""
    for key in "abcd":
        added(answers_folder, **{key: key})
    answers = Answers(answers_folder) if known else Answers(answers_folder / "none")
    answers.folder = answers_folder
    Answers(answers_folder).merge()
    listed, missed = DiskStore.listed, [True]

    def late(path):
        return [] if missed and missed.pop() else listed(path)

    with mock.patch.object(DiskStore, "listed", side_effect=late):
        answers.look()
    assert not missed
    assert all_of(answers) == {key: key for key in "abcd"}


def test_segments_that_are_never_there_end_the_search(answers_folder, monkeypatch):
    added(answers_folder, a="a")
    monkeypatch.setattr(module, "PAUSE", 0)
    (segment,) = segments(answers_folder)
    segment.unlink()
    with (
        mock.patch.object(DiskStore, "listed", return_value=[segment]),
        pytest.raises(CorruptionError, match="come and go"),
    ):
        Answers(answers_folder)


def test_an_answer_is_kept_though_its_folder_went_meanwhile(answers_folder):
    answers = Answers(answers_folder)
    answers.add({"a": {"text": "a"}})
    shutil.rmtree(answers_folder)
    answers.add({"b": {"text": "b"}})
    assert all_of(Answers(answers_folder)) == {"b": "b"}


def test_what_is_merged_holds_every_key_of_what_it_is_merged_from(answers_folder, three_fill_one):
    added(answers_folder, a="a", l="x")
    added(answers_folder, a="A", b="b")
    added(answers_folder, c="c")
    with mock.patch.object(DiskStore, "remove") as removed:  # as if it were killed before
        Answers(answers_folder).merge()
    gone = {Path(call.args[0]).name for call in removed.call_args_list}
    assert len(gone) == 3
    (merged,) = [path for path in segments(answers_folder) if path.name not in gone]
    assert merged.read_bytes() == line("a", "A") + line("b", "b") + line("c", "c") + line("l", "x")
    added(answers_folder, c="c")  # again, by one that did not know
    ops = []
    with watch(ops.append):
        Answers(answers_folder).merge()
    assert segments(answers_folder) == [merged]
    # Whoever put it may have died before its name was durable.
    assert [op.name for op in ops] == ["fsync_folder", *["unlink"] * 3]


def test_lines_of_small_segments_go_along_whichever_of_them_counts(answers_folder, three_fill_one):
    """Of two who merge, each may know another of two equal lines as the one that counts."""
    for text in "xy":
        added(answers_folder, a="a", **{text: text})
    first, second = Answers(answers_folder), Answers(answers_folder)
    read = {}
    for answers in (first, second):
        taken = mock.patch.object(answers, "_put", wraps=answers._put)
        with taken as put, mock.patch.object(DiskStore, "remove"):
            answers.merge()
        read[answers] = put.call_args.args[0]
    assert sorted(read[first]) == sorted(read[second])
    assert len(read[first]) == 3


KILLS = (
    *("answers.before_link", "answers.before_link@2", "answers.after_link", "answers.after_link@2"),
    *range(1, 7),  # at which removal
)


@pytest.mark.parametrize("kill", KILLS)
def test_whoever_dies_while_merging_loses_nothing_and_the_next_ends_it(
    answers_folder, three_fill_one, monkeypatch, kill
):
    monkeypatch.setattr(module, "MERGED_BYTES", module.SMALL_BYTES)
    for key in "abcdef":
        added(answers_folder, **{key: key})
    reader, whole = Answers(answers_folder), {key: key for key in "abcdef"}
    process = CHILDREN.Process(target=merges, args=(answers_folder, kill))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert all_of(reader) == whole == all_of(Answers(answers_folder))
    Answers(answers_folder).merge()
    sizes = [path.stat().st_size for path in answers_folder.iterdir()]
    assert len([size for size in sizes if size]) <= 3  # a draft without content may be a living one
    assert sum(size for size in sizes if size < module.SMALL_BYTES) < module.SMALL_BYTES
    assert all_of(reader) == whole == all_of(Answers(answers_folder))


ADDERS = 3


def test_processes_that_add_while_others_merge_lose_nothing_and_pay_once(
    answers_folder, tmp_path, monkeypatch
):
    stop = CHILDREN.Event()
    own = [[f"{one}-{number}" for number in range(LIVES * STEPS)] for one in range(ADDERS)]
    logs = [tmp_path / f"log-{one}" for one in range(ADDERS)]
    adders = [
        CHILDREN.Process(target=pays, args=(answers_folder, keys, log))
        for keys, log in zip(own, logs, strict=True)
    ]
    mergers = [CHILDREN.Process(target=merges_until, args=(answers_folder, stop)) for _ in range(2)]
    for process in (*adders, *mergers):
        process.start()
    for process in adders:
        process.join(PATIENCE)
    stop.set()
    for process in mergers:
        process.join(PATIENCE)
    assert [process.exitcode for process in (*adders, *mergers)] == [0] * 5
    assert [log.read_text().split() for log in logs] == own
    answers, keys = Answers(answers_folder), [key for some in own for key in some]
    assert dict(answers.of(keys)) == {key: {"text": f"of {key}"} for key in keys}
    assert dict(answers.of(["of all"])) == {"of all": {"text": "0-0"}}
    monkeypatch.setattr(module, "MOST_SMALL", 0)
    monkeypatch.setattr(module, "SMALL_BYTES", 300)
    answers.merge()
    assert len([*answers_folder.iterdir()]) < len(keys) / 2


def test_small_segments_stay_until_a_large_one_that_holds_their_lines_is_whole(
    answers_folder, three_fill_one
):
    for key in "abc":
        added(answers_folder, **{key: key})
    small = segments(answers_folder)
    killed = mock.patch.object(DiskStore, "remove", side_effect=StorageError("killed"))
    with killed, pytest.raises(StorageError, match="killed"):
        Answers(answers_folder).merge()
    (large,) = {*segments(answers_folder)} - {*small}
    known = Answers(answers_folder)
    large.write_bytes(large.read_bytes().replace(b'"text":"a"', b'"text":"A"'))
    with pytest.raises(CorruptionError, match="is damaged"):
        known.merge()
    assert {*small} <= {*segments(answers_folder)}


def test_few_segments_are_left_as_they_are(answers_folder, monkeypatch):
    monkeypatch.setattr(module, "SMALL_BYTES", 3 * len(line("a", "a")))
    for key in "abcdef":
        added(answers_folder, **{key: key})
    before = segments(answers_folder)
    Answers(answers_folder).merge()
    assert segments(answers_folder) == before


def test_many_that_add_and_merge_at_once_lose_nothing(answers_folder, monkeypatch):
    monkeypatch.setattr(module, "MOST_SMALL", 0)
    monkeypatch.setattr(module, "SMALL_BYTES", 500)
    answers_folder.mkdir()

    def work(number):
        answers, draw, mine = Answers(answers_folder), random.Random(number), []
        for step in range(40):
            # Some keys are of all of them.
            keys = [f"{number}-{step}", str(draw.randrange(50)), str(draw.randrange(50))]
            answers.add({key: {"text": f"{key} of {number}"} for key in keys})
            answers.merge()
            mine += keys
            key = draw.choice(mine)
            assert dict(answers.of([key]))[key]["text"].startswith(f"{key} of ")
            assert not Answers(answers_folder).missing(mine)
        return mine

    with ThreadPoolExecutor(4) as pool:
        added_keys = {key for keys in pool.map(work, range(4)) for key in keys}
    assert not Answers(answers_folder).missing(added_keys)
