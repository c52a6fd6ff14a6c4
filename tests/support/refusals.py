"""What a refusal owes a user: it names what he has to change, in whatever words."""

from contextlib import contextmanager

import pytest


def require_names(said, *names):
    """A message that lacks a setting, flag, file, column or number of these helps nobody."""
    missing = [str(name) for name in names if str(name) not in str(said)]
    assert not missing, f"not named: {missing}, in:\n{said}"


@contextmanager
def refuses(kind, *names):
    """An error of this kind that names each of these must end the block."""
    with pytest.raises(kind) as caught:
        yield caught
    require_names(caught.value, *names)
