"""Checks of samples against a reference answer, or by a function of the user's."""

import sys

import pytest

from align.schemas.errors import UsageError
from align.schemas.round_options import JudgeOptions
from align.stages.judge.verifiers import verifier_of

COLUMNS = ("prompt", "completion", "answer")
NUMBER = {"by": "regex", "pattern": r"answer: (?:(\d+)|x)"}


@pytest.mark.parametrize(
    ("text", "answer", "score", "options"),
    [
        ("  4\n", "4 ", 1.0, {"by": "exact"}),
        ("4", 4, 1.0, {"by": "exact"}),
        ("4.0", 4, 0.0, {"by": "exact"}),
        ("Four", "four", 0.0, {"by": "exact"}),
        ("2  2", "2 2", 0.0, {"by": "exact"}),
        ("4", None, None, {"by": "exact"}),
        ("So the answer: 42.", "42", 1.0, NUMBER),
        ("answer: 41, no, answer: 42", "42", 0.0, NUMBER),  # the first match
        ("It is 42.", "42", 0.0, NUMBER),  # none
        ("answer: x", "42", 0.0, NUMBER),  # a match without its first group
        ("answer: 42", None, None, NUMBER),
    ],
)
def test_exact_strips_blanks_alone_and_regex_takes_the_first_group_of_the_first_match(
    text, answer, score, options
):
    check, _ = verifier_of(JudgeOptions(**options), COLUMNS)
    assert check({"prompt": "Q", "prompt_key": "k", "number": 0, "answer": answer}, text) == score


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"by": "exact", "answer": "gold"}, "no column 'gold'"),
        ({"by": "regex", "pattern": "("}, "not a regular expression"),
        ({"by": "regex", "pattern": "a+"}, "has no group"),
        ({"by": "function", "function": "none:f"}, "cannot be imported"),
        ({"by": "function", "function": "own_checks"}, "expected MODULE"),
        ({"by": "function", "function": "math:nothing"}, "has no function 'nothing'"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_work(options, said):
    with pytest.raises(UsageError, match=said):
        verifier_of(JudgeOptions(**options), COLUMNS)


@pytest.fixture
def forget():
    """Makes the modules of this file's tests new ones."""

    def drop():
        for name in ("own_checks", "own_help"):
            sys.modules.pop(name, None)

    yield drop
    drop()


def test_a_function_is_found_in_the_current_folder_and_its_failure_names_the_sample(here, forget):
    (here / "own_checks.py").write_text(
        "def length(prompt, completion, row): return len(completion) / row['number']\n"
        "def even(prompt, completion, row): return len(completion) % 2 == 0\n"
        "def nan(prompt, completion, row): return float('nan')\n"
        "def word(prompt, completion, row): return 'good'\n"
    )

    def checked(function, text="four", number=2):
        options = JudgeOptions(by="function", function=f"own_checks:{function}")
        check, _ = verifier_of(options, ())
        return check({"prompt": "Q", "prompt_key": "abc", "number": number}, text)

    assert checked("length") == 2.0
    assert (checked("even"), checked("even", "odd")) == (1.0, 0.0)
    assert str(here) not in sys.path
    with pytest.raises(UsageError, match="sample 0 of prompt abc: it raised ZeroDivisionError"):
        checked("length", number=0)
    for name, said in (("nan", "nan"), ("word", "'good'")):
        with pytest.raises(UsageError, match=f"it returned {said}"):
            checked(name)


@pytest.mark.parametrize("imported", ["import own_help as h", "from own_help import WORD as h"])
def test_the_code_that_a_function_imports_from_beside_it_names_the_judge_too(
    here, forget, imported
):
    def source():
        options = JudgeOptions(by="function", function="own_checks:grade")
        return verifier_of(options, ())[1]["source"]

    (here / "own_checks.py").write_text(f"import json\n{imported}\ndef grade(*row): return 1\n")
    (here / "own_help.py").write_text("WORD = 'one'\n")
    first = source()
    (here / "own_help.py").write_text("WORD = 'two'\n")
    assert source() == first  # the code that runs was read before
    forget()
    assert source() != first
    (here / "own_help.py").write_text("WORD = 'one'\n")
    forget()
    assert source() == first
