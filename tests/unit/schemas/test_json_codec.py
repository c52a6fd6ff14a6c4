"""Records become JSON and come back as they were; what a person or a disk changed is refused."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.schemas.json_codec import (
    CodecError,
    digest,
    from_json,
    from_signed_json,
    to_json,
    to_signed_json,
)


@dataclass(frozen=True)
class Inner:
    size: int
    ratio: float = field(default=0.5, metadata={"description": "a share", "ge": 0, "lt": 1})


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


@given(st.floats(allow_nan=False, allow_infinity=False), st.characters(categories=["Cs", "L"]))
def test_every_number_and_every_name_of_a_file_survives_the_journey(number, text):
    value = Measured({text: number}, text)
    assert repr(from_json(Measured, to_json(value))) == repr(value)
    assert from_json(Outer, to_json(VALUE)) == VALUE
    assert from_signed_json(Outer, to_signed_json(VALUE).encode()) == VALUE
    assert digest({"a": number, "b": text}) == digest({"b": text, "a": number})


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
