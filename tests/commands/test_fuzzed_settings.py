"""Odd and damaged settings: what is accepted is what is written; the rest is one error of ours."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from align.pipeline.options.settings import as_yaml, flatten, load_settings, template
from align.schemas.config import Config
from align.schemas.errors import AlignError

DEFAULTS = flatten(Config())
BOOLS = {True: {"true", "True", "TRUE"}, False: {"false", "False", "FALSE"}}
INT = r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+"
ODD = (
    *("0", "-1", "7", "0.25", "1.", ".5", "1e-6", "1e309", "1e-400", ".inf", ".nan", "nan"),
    *(str(2**63), "9" * 25, "1_000", "0x1F", "010", "1:30", "2026-01-31", "٣", "1e", "1,000"),
    *("~", "null", "true", "Off", "y", "auto", "'1'", '"true"', "x", "é✓", "a: b", "a #b", ""),
    *("[]", "[a, b]", "[[1]]", "[~]", "{}", "{a: b}", "{a: {b: c}}", "{1: a}", "*a", "&a [*a]"),
    *("!!int '1'", "!!python/name:os.system", "[" * 600, "x" * 9999, '"a\\0b"', "- x", "|", "%x"),
    *("1e-5,2e-5", "2026-02-30", "0x", ".nan", "9" * 4999, "!!float x", "!c d", "? 1\n: 2"),
    *("'", '"', '"\\ud800"', "\0", "%YAML 9.9", "---\n---", "~nosuchuser", "\x1b[31m", "\x00a"),
)
NOTHING = ("", "~", "null", "Null", "NULL")
DRAWN = settings(derandomize=True, max_examples=20)
pytestmark = pytest.mark.usefixtures("here")


def is_written(value, text):
    """Whether a value is the one of a text, or a collection of texts, as YAML has them."""
    if isinstance(value, bool):
        return text in BOOLS[value]
    if isinstance(value, int | float):
        if re.fullmatch(INT, text):
            return type(value)(int(text, 0 if text[:2] in {"0x", "0o"} else 10)) == value
        return isinstance(value, float) and float(text) == value
    if isinstance(value, list):
        return len(value) == len(text) and all(map(is_written, value, text))
    if isinstance(value, dict):
        return value.keys() == text.keys() and all(is_written(value[k], text[k]) for k in value)
    return value == text or value.startswith("/")  # a path, which is made absolute


def require_sound(text, sets=()):
    """The settings of a file and of --set are refused by name, or each is as it is written."""
    Path("align.yaml").write_bytes(text)
    refused = ""
    try:
        config = load_settings({}, sets, file=Path("align.yaml")).config
        found = flatten(config)
        as_yaml(config).encode()
    except AlignError as error:
        refused = str(error)
    if refused:
        assert "align.yaml" in refused or "--set" in refused
        assert len(refused) < 1500
        return
    # Of this loader every scalar is the text that is written.
    sections = yaml.load(text, yaml.BaseLoader) or {}
    written = {
        f"{at}.{name}": of for at, one in sections.items() for name, of in (one or {}).items()
    }
    for name, word in (one.split("=", 1) for one in sets):
        written[name] = word if found[name] == word else yaml.load(word, yaml.BaseLoader)
    for name, value in written.items():
        if value not in NOTHING:
            assert is_written(found[name], value), (name, found[name], value)
    for name in found.keys() - written.keys():
        assert found[name] == DEFAULTS[name]


numbers = st.one_of(st.integers(-(2**65), 2**65), st.floats(width=32)).map(str)


@DRAWN
@given(
    name=st.sampled_from([*DEFAULTS, "method.beta", "train"]),
    text=st.one_of(st.sampled_from(ODD), numbers, st.text(max_size=20)),
)
def test_a_value_is_read_as_it_is_written_or_refused(name, text):
    section, _, key = name.partition(".")
    require_sound(f"{section}:\n  {key}: {text}\n".encode())
    require_sound(b"", [f"{name}={text}"])


@DRAWN
@given(place=st.integers(0, 10**6), size=st.integers(0, 400), part=st.sampled_from(ODD))
def test_a_damaged_file_is_read_as_it_stands_or_refused(place, size, part):
    whole = template(None).encode()
    at = place % len(whole)
    require_sound(whole[:at])
    require_sound(whole[:at] + whole[at + size :])
    require_sound(whole[:at] + part.encode() + whole[at:])
    require_sound(whole[:at] + bytes([whole[at] ^ 1 << size % 8]) + whole[at + 1 :])


def test_line_ends_and_a_byte_order_mark_change_nothing():
    whole = b"train:\n  lr: 0.5\n"
    require_sound(whole.replace(b"\n", b"\r\n"))
    require_sound(b"\xef\xbb\xbf" + whole)
    assert load_settings({}, (), file=Path("align.yaml")).config.train.lr == 0.5
