"""What messages are made of, and what they never show."""

import json

import pytest

from align.schemas.safe_text import (
    bare_address,
    beginning,
    is_plain_path,
    mask_secrets_of,
    masked,
    masked_address,
    redacted,
    shown,
)


@pytest.mark.parametrize(
    ("address", "said", "bare"),
    [
        ("https://TOKEN@host:5000/x", "https://***@host:5000/x", "https://host:5000/x"),
        ("http://me:pa/ss@host", "http://***@host", "http://host"),
        ("http://me:pa#ss@host", "http://***", "http://host"),
        ("http://h:1/p?password=a@b", "http://***", "http://b"),
        ("http://h?token=abc&plain=1", "http://h?token=***&plain=***", "http://h"),
        ("http://h/x#secret", "http://h/x#***", "http://h/x"),
        ("postgresql+psycopg2://me:p%2Fw@db/ml", "postgresql+psycopg2://***@db/ml", None),
        ("sqlite:////home/a@b/x.db", "sqlite:////home/a@b/x.db", "sqlite:////home/a@b/x.db"),
        ("http://[", "http://[", "http://["),
    ],
)
def test_an_address_shows_where_and_not_by_which_secret(address, said, bare):
    assert masked_address(address) == masked(address) == said
    assert bare_address(address) == (bare or said.replace("***@", ""))
    assert masked(f"no answer from {address} today") == f"no answer from {said} today"


def test_an_address_without_a_scheme_gets_none():
    assert bare_address("me:pass@127.0.0.1:9/v1?key=1") == "127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/data/adapter?token=abc", "/data/adapter?token=***"),
        ("url: /api/2.0?access_token=a1b2&x=1", "url: /api/2.0?access_token=***&x=1"),
        ("Authorization: Bearer abcdefgh.1", "Authorization: Bearer ***"),
        ("hf_abcdefghijklmnopqrst", "***"),
        ("key ghp_abcdefghijklmnopqrst.", "key ***."),
        ("pad_token=5, tokens: 3, max_length=2", "pad_token=5, tokens: 3, max_length=2"),
        ("risk-abcdefghijklmnopqrstuvwxyz", "risk-abcdefghijklmnopqrstuvwxyz"),
        ("0123456789abcdef" * 4, "0123456789abcdef" * 4),
    ],
)
def test_text_that_is_not_an_address_loses_its_secrets_and_nothing_else(text, said):
    assert masked(text) == said


def test_settings_are_masked_at_any_depth():
    settings = {"comet": {"api_key": "abc", "urls": ["http://a:b@c"]}, "pad_token": "</s>", "lr": 1}
    assert masked(settings) == {
        "comet": {"api_key": "***", "urls": ["http://***@c"]},
        "pad_token": "</s>",
        "lr": 1,
    }


def test_parts_of_a_password_are_masked_where_a_library_prints_them():
    """What urllib says of a password with a slash in it, and of one that it decoded."""
    mask_secrets_of("http://me:pa/ssword@host")
    mask_secrets_of("postgresql://me:two%2Fwords@db/x")
    assert redacted("Port could not be cast to integer value as 'pa'") == (
        "Port could not be cast to integer value as '***'"
    )
    assert redacted("login two/words refused: words") == "login *** refused: ***"
    assert redacted("a path, a passage") == "a path, a passage"


def test_secrets_of_the_environment_are_never_printed(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "swordfish")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert redacted("login with swordfish is false") == "login with *** is false"


def test_a_long_secret_is_masked_inside_of_a_word_and_never_cut_in_two(monkeypatch):
    secret = "swordfish-and-chips"
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", secret)
    assert redacted(f"x{secret}y {secret}s") == "x***y ***s"
    text = f"login {secret} fails"
    cut = {beginning(text, most) for most in range(6, 6 + len(secret))}
    assert cut == {"login "}
    assert beginning(text, 25) == f"login {secret}"
    assert beginning(text, 3) == "log"
    assert beginning(text, 100) == text


def test_what_a_terminal_would_obey_is_written_out():
    assert shown("a\x1b[31mb\u202ec\x9bd\x7f\r") == ("a\\u001b[31mb\\u202ec\\u009bd\\u007f\\r")
    assert shown("two\nlines\t[bold]é\u3000字") == "two\nlines\t[bold]é\u3000字"
    # And JSON stays JSON.
    plain = {"name": "a\x1b\x9b\u202e\U000e0001b", "text": "é\n"}
    assert json.loads(shown(json.dumps(plain, ensure_ascii=False))) == plain


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
