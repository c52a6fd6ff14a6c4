"""Checks of samples against a reference answer, or by a function of the user's."""

import sys

import pytest

from align.schemas.errors import UsageError
from align.schemas.round_options import JudgeOptions
from align.stages.judge.verifiers import verifier_of

COLUMNS = ("prompt", "completion", "answer")


def verify(text, answer, **options):
    check, _ = verifier_of(JudgeOptions(**options), COLUMNS)
    row = {"prompt": "Q", "prompt_key": "k", "number": 0, "answer": answer}
    return check(row, text)


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("4", "4", 1.0),
        ("  4\n", "4 ", 1.0),
        ("4", 4, 1.0),
        ("4.0", 4, 0.0),
        ("Four", "four", 0.0),
        ("2  2", "2 2", 0.0),
        ("4", None, None),
    ],
)
def test_exact_strips_blanks_and_nothing_else(text, answer, score):
    assert verify(text, answer, by="exact") == score


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("So the answer: 42.", "42", 1.0),
        ("answer: 41, no, answer: 42", "42", 0.0),  # the first match
        ("It is 42.", "42", 0.0),  # none
        ("answer: x", "42", 0.0),  # a match without its first group
        ("answer: 42", None, None),
    ],
)
def test_regex_compares_the_first_group_of_the_first_match(text, answer, score):
    assert verify(text, answer, by="regex", pattern=r"answer: (?:(\d+)|x)") == score


def test_what_cannot_be_checked_is_refused_before_work():
    with pytest.raises(UsageError, match="no column 'gold'"):
        verifier_of(JudgeOptions(by="exact", answer="gold"), COLUMNS)
    with pytest.raises(UsageError, match="not a regular expression"):
        verifier_of(JudgeOptions(by="regex", pattern="("), COLUMNS)
    with pytest.raises(UsageError, match="has no group"):
        verifier_of(JudgeOptions(by="regex", pattern="a+"), COLUMNS)


@pytest.fixture
def checks(here):
    """A module in the current folder, which no other test sees."""
    (here / "own_checks.py").write_text(
        "def length(prompt, completion, row): return len(completion) / row['number']\n"
        "def even(prompt, completion, row): return len(completion) % 2 == 0\n"
        "def nan(prompt, completion, row): return float('nan')\n"
        "def word(prompt, completion, row): return 'good'\n"
    )
    yield here
    sys.modules.pop("own_checks", None)


def checked(function, text="four", number=2):
    check, named = verifier_of(JudgeOptions(by="function", function=f"own_checks:{function}"), ())
    assert len(named["source"]) == 64
    return check({"prompt": "Q", "prompt_key": "abc", "number": number}, text)


def test_a_function_is_found_in_the_current_folder(checks):
    assert checked("length") == 2.0
    assert (checked("even"), checked("even", "odd")) == (1.0, 0.0)
    assert str(checks) not in sys.path


def forget():
    for name in ("own_checks", "own_help"):
        sys.modules.pop(name, None)


def source_of(function="own_checks:grade"):
    return verifier_of(JudgeOptions(by="function", function=function), ())[1]["source"]


@pytest.mark.parametrize("imported", ["import own_help as h", "from own_help import WORD as h"])
def test_the_code_that_a_function_imports_from_beside_it_names_the_judge_too(checks, imported):
    (checks / "own_checks.py").write_text(f"import json\n{imported}\ndef grade(*row): return 1\n")
    (checks / "own_help.py").write_text("WORD = 'one'\n")
    forget()
    first = source_of()
    (checks / "own_help.py").write_text("WORD = 'two'\n")
    assert source_of() == first  # the code that runs was read before
    forget()
    assert source_of() != first
    (checks / "own_help.py").write_text("WORD = 'one'\n")
    forget()
    assert source_of() == first
    forget()


def test_a_function_that_fails_names_the_sample(checks):
    with pytest.raises(UsageError, match="sample 0 of prompt abc: it raised ZeroDivisionError"):
        checked("length", number=0)
    with pytest.raises(UsageError, match="it returned nan"):
        checked("nan")
    with pytest.raises(UsageError, match="it returned 'good'"):
        checked("word")
    with pytest.raises(UsageError, match="has no function 'nothing'"):
        checked("nothing")
    for name, message in (("none:f", "cannot be imported"), ("own_checks", "expected MODULE")):
        with pytest.raises(UsageError, match=message):
            verifier_of(JudgeOptions(by="function", function=name), ())
