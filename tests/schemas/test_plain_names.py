"""Names that are read from files lead to no other folder."""

import pytest

from align.schemas.safe_text import is_plain_path


@pytest.mark.parametrize(
    ("path", "is_plain"),
    [
        ("a", True),
        ("a/b.bin", True),
        *((p, False) for p in ("", "..", "../a", "a/..", "/a", "a\\b")),
    ],
)
def test_a_path_of_plain_names_stays_below_its_folder(path, is_plain):
    assert is_plain_path(path) == is_plain
