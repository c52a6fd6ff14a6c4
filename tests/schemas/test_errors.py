"""The parts of which messages are made."""

import pytest

from align.schemas.errors import closest, counted, did_you_mean


@pytest.mark.parametrize(
    ("count", "things", "said"),
    [
        (1, "duplicate rows", "1 duplicate row"),
        (1, "pairs with equal completions", "1 pair with equal completions"),
        (0, "rows", "0 rows"),
        (2_000, "rows", "2,000 rows"),
    ],
)
def test_one_thing_is_named_in_the_singular(count, things, said):
    assert counted(count, things) == said


def test_the_name_that_was_meant_is_guessed_or_nothing_is_said():
    known = ["batch_size", "beta1", "beta2"]
    assert did_you_mean(closest("bath_size", known)) == " Did you mean 'batch_size'?"
    assert did_you_mean(closest("beta", known, 2)) == " Did you mean 'beta2' or 'beta1'?"
    assert did_you_mean(closest("xyz", known)) == ""
