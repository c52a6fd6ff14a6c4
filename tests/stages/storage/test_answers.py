"""Answers: durable once added, kept once, read whoever merges them, on a disk and in a store."""

import hashlib
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from align.schemas.errors import CorruptionError
from align.stages.storage import answers as module
from align.stages.storage.answers import Answers
from align.stages.storage.disk.disk_store import DiskStore


@pytest.fixture
def answers_folder(tmp_path):
    return tmp_path / "answers"


def added(answers_folder, **texts):
    Answers(answers_folder).add({key: {"text": text} for key, text in texts.items()})


def all_of(answers):
    return {key: answers.get(key)["text"] for key in "abcdefgh" if key in answers}


DEAD = f".{'0' * 64}.jsonl.{'1' * 16}.tmp"


def segments(answers_folder):
    return sorted(answers_folder.glob("[!.]*"))


@pytest.fixture
def few_segments(monkeypatch):
    """From its call on, three small segments are many."""
    return lambda: monkeypatch.setattr(module, "MOST_SMALL", 2)


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
        for text in order:
            added(tmp_path / order, a=text)
        assert all_of(Answers(tmp_path / order)) == {"a": "b"}
    # Were there two, one process could remove the first for the second, another the reverse.
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


@pytest.mark.parametrize("place", ["disk", "store"])
def test_small_segments_are_merged_while_answers_are_added_and_read(
    answers_folder, few_segments, monkeypatch, request, place
):
    if place == "store":
        answers_folder = request.getfixturevalue("bucket") / "answers"
    monkeypatch.setattr(module, "KEPT_SEGMENTS", 1)  # so that a reader reads them again
    assert all_of(Answers(answers_folder)) == {}
    few_segments()
    for key in "ab":
        added(answers_folder, **{key: key})
    reader, writer = Answers(answers_folder), Answers(answers_folder)
    for key in "cdef":
        added(answers_folder, **{key: key})
        assert len([*answers_folder.iterdir()]) <= 2
    assert [reader.get(key)["text"] for key in "ab"] == ["a", "b"]
    reader.look()
    assert all_of(reader) == {key: key for key in "abcdef"} == all_of(Answers(answers_folder))
    assert dict(reader.of("abc")) == {key: {"text": key} for key in "abc"}
    writer.add({"a": {"text": "A"}})  # what it knew of it was merged away
    assert all_of(writer) == {key: key for key in "abcdef"} | {"a": "A"}


def test_an_answer_is_kept_though_its_folder_went_meanwhile(answers_folder):
    answers = Answers(answers_folder)
    answers.add({"a": {"text": "a"}})
    shutil.rmtree(answers_folder)
    answers.add({"b": {"text": "b"}})
    assert all_of(Answers(answers_folder)) == {"b": "b"}


def test_what_is_merged_holds_every_key_of_what_it_is_merged_from(answers_folder, few_segments):
    added(answers_folder, a="a", large="x")
    added(answers_folder, a="a", b="b")
    added(answers_folder, c="c")
    few_segments()
    with mock.patch.object(DiskStore, "remove") as removed:  # as if it were killed before
        Answers(answers_folder).merge()
    gone = {Path(call.args[0]).name for call in removed.call_args_list}
    assert len(gone) == 3
    (merged,) = [path for path in segments(answers_folder) if path.name not in gone]
    lines = merged.read_text().splitlines()
    assert sorted(json.loads(line)["key"] for line in lines) == ["a", "b", "c", "large"]
    Answers(answers_folder).merge()
    assert segments(answers_folder) == [merged]


def test_many_that_add_and_merge_at_once_lose_nothing(answers_folder, monkeypatch):
    monkeypatch.setattr(module, "MOST_SMALL", 8)
    answers_folder.mkdir()

    def work(number):
        answers, draw, mine = Answers(answers_folder), random.Random(number), []
        for step in range(40):
            # Some keys are of all of them.
            keys = [f"{number}-{step}", str(draw.randrange(50)), str(draw.randrange(50))]
            answers.add({key: {"text": f"{key} of {number}"} for key in keys})
            mine += keys
            key = draw.choice(mine)
            assert answers.get(key)["text"].startswith(f"{key} of ")
            assert not Answers(answers_folder).missing(mine)
        return mine

    with ThreadPoolExecutor(4) as pool:
        added_keys = {key for keys in pool.map(work, range(4)) for key in keys}
    assert not Answers(answers_folder).missing(added_keys)
