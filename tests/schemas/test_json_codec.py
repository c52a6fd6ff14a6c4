"""Records become JSON and come back as they were; what a person or a disk changed is refused."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from align.schemas.config import Config
from align.schemas.json_codec import (
    CodecError,
    digest,
    from_json,
    from_plain,
    from_signed_json,
    to_json,
    to_signed_json,
)
from align.schemas.option import option


@dataclass(frozen=True)
class Inner:
    size: int
    ratio: float = option(0.5, "a share", ge=0, lt=1)


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["left", "right"]
    inner: Inner
    parts: tuple[Inner, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    flag: bool = False


@dataclass(frozen=True)
class Measured:
    values: dict[str, float]
    folder: str


VALUE = Outer("a", "left", Inner(1, 0.25), (Inner(2), Inner(3)), {"x": 1})
PLAIN = {"name": "a", "kind": "left", "inner": {"size": 1, "ratio": 0}}


@given(st.floats(allow_nan=False, allow_infinity=False), st.characters(categories=["Cs", "L"]))
def test_every_number_and_every_name_of_a_file_survives_the_journey(number, text):
    value = Measured({text: number}, text)
    assert repr(from_json(Measured, to_json(value))) == repr(value)
    assert from_json(Outer, to_json(VALUE)) == VALUE
    assert from_signed_json(Outer, to_signed_json(VALUE).encode()) == VALUE
    assert digest({"a": number, "b": text}) == digest({"b": text, "a": number})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nme": "a"}, r"^unknown key 'nme'. Did you mean 'name'\?$"),
        ({"kind": "lft"}, r"^kind: expected left or right, found 'lft' .str.. Did you mean 'left'"),
        ({"inner": {"size": "3"}}, r"inner.size: expected a whole number, found '3' \(str\)"),
        ({"inner": {"size": 1, "ratio": 1}}, "a number of at least 0 and below 1, found 1"),
        ({"inner": {"size": 1, "ratio": float("nan")}}, "inner.ratio is nan; it must be finite"),
        ({"inner": {}}, "^inner.size: missing$"),
        ({"inner": {"size": 1 << 63}}, "inner.size is 9223372036854775808; it cannot be that larg"),
        ({"parts": [{"size": 1, "sise": 2}]}, r"unknown key 'parts\[0\].sise'"),
        ({"inner": None}, r"inner: expected a mapping, found None"),
        ({"name": "a\0"}, "name is 'a.x00': not plain text"),
        ({"flag": 1}, "flag: expected true or false, found 1"),
    ],
)
def test_what_does_not_fit_is_named_and_what_is_left_out_has_its_default(change, message):
    assert from_plain(Outer, PLAIN) == Outer("a", "left", Inner(1, 0.0))
    with pytest.raises(CodecError, match=message):
        from_plain(Outer, PLAIN | change)


@dataclass(frozen=True)
class Weighted:
    weight: Annotated[float, Field(gt=0)] | Literal["auto"] | None = None


def test_a_field_of_several_kinds_takes_the_one_that_fits_or_names_them_all():
    for one, weight in ((2, 2.0), ("auto", "auto"), (None, None)):
        assert from_plain(Weighted, {"weight": one}).weight == weight
    for wrong in ("atuo", 0, True, [1]):
        with pytest.raises(CodecError, match="^weight: expected a number above 0 or auto, found "):
            from_plain(Weighted, {"weight": wrong})


def test_a_record_that_was_not_written_so_is_refused():
    """Whatever pydantic would convert, or a default would fill, is another text."""
    for change in (
        {"name": 1},
        {"kind": "up"},
        {"inner": {"size": 1.0, "ratio": 0.5}},
        {"inner": {"size": 1}},
        {"inner": {"size": 1, "ratio": 0}},
        {"flag": 0},
        {"new": 1},
    ):
        with pytest.raises(CodecError):
            from_json(Outer, to_json(dataclasses.asdict(VALUE) | change))


def test_a_record_of_other_bytes_is_refused():
    for spoil in (
        lambda text: "{",
        lambda text: "[" * 10_000,
        lambda text: " " + text,
        lambda text: text.replace('"name":"a"', '"name":"b","name":"a"'),
        lambda text: text.replace("0.25", "2.5e-1"),
        lambda text: text.replace("0.25", "NaN"),
        lambda text: text.replace("0.25", "1e999"),
    ):
        with pytest.raises(CodecError):
            from_json(Outer, spoil(to_json(VALUE)))
        with pytest.raises(CodecError):
            from_signed_json(Outer, spoil(to_signed_json(VALUE)))


def test_every_default_is_one_that_may_be_set():
    assert from_plain(Config, dataclasses.asdict(Config())) == Config()
