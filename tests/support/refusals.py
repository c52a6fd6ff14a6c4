"""A refusal names what the user has to change, in whatever words."""

from contextlib import contextmanager

import pytest


def require_names(said, *names):
    """Requires a message to contain each of these settings, flags, files, columns or numbers."""
    missing = [str(name) for name in names if str(name) not in str(said)]
    assert not missing, f"not named: {missing}, in:\n{said}"


@contextmanager
def refuses(kind, *names):
    """Requires the block to end with an error of this kind that contains each name."""
    with pytest.raises(kind) as caught:
        yield caught
    require_names(caught.value, *names)
