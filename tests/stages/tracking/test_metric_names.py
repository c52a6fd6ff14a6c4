import pytest

from align.stages.tracking.journal import key_of, shortened


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("rewards/chosen", "rewards/chosen"),
        ("tokens.max_length", "tokens.max_length"),
        ("loss@1:2", "loss_1_2"),
        ("/a//../b/./c/", "a/b/c"),
        ("größe", "gr__e"),
        ("", "_"),
        ("..", "_"),
    ],
)
def test_a_key_is_what_mlflow_accepts(name, key):
    assert key_of(name) == key


def test_a_long_key_is_cut():
    assert len(key_of("k" * 999)) == 250


def test_a_long_value_keeps_its_beginning_and_shows_the_cut():
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abcde…"
