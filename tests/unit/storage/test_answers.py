"""Answers: durable once added, kept once, the same for every process."""

import errno
import itertools
import os
import shutil

import pytest

from align.schemas.errors import AlignError, CorruptionError, StorageError
from align.stages.storage.answers import Answers
from support import disk_faults
from support.flips import flip_bits
from support.made_caches import KILLED, at_once, in_child

LIVES, STEPS = 5, 6


@pytest.fixture
def answers_folder(tmp_path):
    return tmp_path / "answers"


def added(answers_folder, **texts):
    Answers(answers_folder).add({key: {"text": text} for key, text in texts.items()})


def all_of(answers):
    return {key: answer["text"] for key, answer in answers.of("abcdefgh")}


def test_an_answer_is_there_for_every_process_once_it_is_added(answers_folder):
    first, second = Answers(answers_folder), Answers(answers_folder)
    first.add({"a": {"text": "one"}, "b": {"text": "two"}})
    assert all_of(first) == {"a": "one", "b": "two"}
    assert second.missing("a") == ["a"]
    second.look()
    second.add({"c": {"text": "three"}})
    assert (
        all_of(second) == {"a": "one", "b": "two", "c": "three"} == all_of(Answers(answers_folder))
    )
    assert second.missing(["e", "a", "d"]) == ["e", "d"]
    assert dict(second.of(["b", "x"])) == {"b": {"text": "two"}}
    assert len([*answers_folder.iterdir()]) == 2, "a file for each writer"
    assert {path.stat().st_mode & 0o777 for path in answers_folder.iterdir()} == {0o600}


def test_a_refusal_is_known_to_every_process_until_there_is_an_answer(answers_folder):
    Answers(answers_folder).add({"a": {"text": "one"}}, {"b": "too long"})
    other = Answers(answers_folder)
    assert other.refused("abc") == {"b": "too long"}
    assert other.missing("abc") == ["b", "c"]
    added(answers_folder, b="two")
    other.look()
    assert other.refused("abc") == {}
    assert all_of(other) == {"a": "one", "b": "two"}


def test_of_two_answers_the_smaller_line_counts(tmp_path):
    for order in ("xb", "bx"):
        reader = Answers(tmp_path / order)
        for text, key in itertools.product(order, "abcdefgh"):
            added(tmp_path / order, **{key: text})
            reader.look()
        whole = dict.fromkeys("abcdefgh", "b")
        assert all_of(reader) == whole == all_of(Answers(tmp_path / order))


def test_a_torn_last_line_is_passed_over_and_counts_once_it_is_whole(answers_folder):
    Answers(answers_folder).add({"a": {"text": "x"}, "b": {"text": "y"}})
    (file,) = answers_folder.iterdir()
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        file.write_bytes(whole[:size])
        assert all_of(Answers(answers_folder)) == {"a": "x"}
    reader = Answers(answers_folder)
    added(answers_folder, b="Y")
    file.write_bytes(whole)
    reader.look()
    assert all_of(reader) == {"a": "x", "b": "Y"} == all_of(Answers(answers_folder))


def test_after_a_full_disk_nothing_follows_the_half_of_a_line(answers_folder):
    answers = Answers(answers_folder)
    answers.add({"a": {"text": "x"}})
    (file,) = answers_folder.iterdir()

    def full(op):
        if op.name == "fsync":
            os.truncate(file, file.stat().st_size - 9)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with disk_faults.watch(full), pytest.raises(StorageError) as refused:
        answers.add({"b": {"text": "y"}})
    assert refused.value.exit_code == 74
    assert file.name in str(refused.value)
    answers.add({"c": {"text": "z"}})
    assert all_of(Answers(answers_folder)) == {"a": "x", "c": "z"}
    assert len([*answers_folder.iterdir()]) == 2


def test_a_flipped_bit_is_refused_with_the_file_or_changes_no_answer(answers_folder):
    texts, found = {key: f"of {key}" for key in "abcd"}, 0
    for key, text in texts.items():
        added(answers_folder, **{key: text})
    reader = Answers(answers_folder)
    for path in answers_folder.iterdir():
        for _ in flip_bits(path, 15):
            for read in (lambda: all_of(Answers(answers_folder)), lambda: all_of(reader)):
                try:
                    assert read().items() <= texts.items()  # without its end a line is not whole
                except CorruptionError as error:
                    found += 1
                    assert path.name in str(error)  # noqa: PT017
    assert found > 60


def test_known_answers_that_are_gone_are_an_error(answers_folder):
    answers = Answers(answers_folder)
    answers.add({"a": {"text": "a"}})
    shutil.rmtree(answers_folder)
    with pytest.raises(AlignError):
        dict(answers.of("a"))
    answers.add({"b": {"text": "b"}})
    assert all_of(Answers(answers_folder)) == {"b": "b"}
    assert dict(answers.of("b")) == {"b": {"text": "b"}}


@pytest.mark.parametrize(
    ("fault", "kept"),
    [
        ("before:make_folder:answers", 0),
        ("before:fsync:answers-*.jsonl", 2),  # the system has the lines, and no power was lost
        ("after:fsync:answers-*.jsonl", 2),
        ("before:fsync_folder:answers", 2),
        ("after:fsync:answers-*.jsonl@2", 4),
    ],
)
def test_a_writer_that_is_killed_loses_nothing_of_what_it_has_added(answers_folder, fault, kept):
    where, _, visit = fault.partition("@")

    def add():
        disk_faults.arm(f"{where}=kill@{visit or 1}")
        answers = Answers(answers_folder)
        for pair in ("ab", "cd", "ef"):
            answers.add({key: {"text": key} for key in pair})

    assert in_child(add) == KILLED
    assert all_of(Answers(answers_folder)) == {key: key for key in "abcdef"[:kept]}


def test_an_answer_is_synced_with_its_name_before_add_returns(answers_folder):
    answers, seen = Answers(answers_folder), []
    with disk_faults.watch(lambda op: seen.append((op.name, op.path))):
        for key in "ab":
            answers.add({key: {"text": key}})
    (file,) = answers_folder.iterdir()
    assert seen == [
        ("make_folder", answers_folder),
        ("fsync", file),
        ("fsync_folder", answers_folder),
        ("fsync_folder", answers_folder.parent),
        ("make_folder", answers_folder),
        ("fsync", file),
    ]


def test_processes_that_add_at_once_lose_nothing_and_pay_once(answers_folder, tmp_path):
    """Each has several lives, which begin with what is stored."""
    own = [[f"{one}-{number}" for number in range(LIVES * STEPS)] for one in range(3)]

    def pay(one):
        for life in range(1, LIVES + 1):
            answers = Answers(answers_folder)
            for key in own[one][: life * STEPS]:
                if answers.missing([key]):
                    with (tmp_path / str(one)).open("a") as paid:
                        paid.write(f"{key}\n")
                    answers.add({key: {"text": f"of {key}"}, "of all": {"text": own[one][0]}})
                    answers.look()
                assert dict(answers.of([key])) == {key: {"text": f"of {key}"}}

    assert at_once(3, pay) == [0, 0, 0]
    assert [(tmp_path / str(one)).read_text().split() for one in range(3)] == own
    answers = Answers(answers_folder)
    for keys in own:
        assert dict(answers.of(keys)) == {key: {"text": f"of {key}"} for key in keys}
    assert dict(answers.of(["of all"])) == {"of all": {"text": "0-0"}}
