from dataclasses import dataclass, field
from typing import Literal

import pytest

from align.schemas.json_codec import CodecError, digest, from_json, from_plain, to_json


@dataclass(frozen=True)
class Inner:
    size: int
    ratio: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["left", "right"]
    inner: Inner
    parts: tuple[Inner, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


VALUE = Outer("a", "left", Inner(1, 2.0), (Inner(2), Inner(3)), {"x": 1})


def test_a_value_survives_the_journey():
    assert from_json(Outer, to_json(VALUE)) == VALUE


def test_equal_values_have_equal_texts_whatever_their_order_of_making():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nme": "a"}, r"unknown key 'nme'. Did you mean 'name'\?"),
        ({"kind": "lft"}, r"kind: expected one of left, right; .*Did you mean 'left'\?"),
        ({"inner": {"size": "3"}}, r"inner.size: expected a whole number, found '3' \(str\)"),
        ({"inner": {"size": True}}, r"inner.size: expected a whole number, found True"),
        ({"parts": [{"size": 1, "sise": 2}]}, r"unknown key 'parts\[0\].sise'"),
        ({"counts": {"x": 1.5}}, r"counts.x: expected a whole number"),
        ({"inner": 3}, r"inner: expected a mapping"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    plain = {"name": "a", "kind": "left", "inner": {"size": 1, "ratio": 1}}
    with pytest.raises(CodecError, match=message):
        from_plain(Outer, plain | change, partial=True)


@dataclass(frozen=True)
class Weighted:
    weight: float | Literal["auto"] | None = None


@pytest.mark.parametrize(("given", "weight"), [(2, 2.0), ("auto", "auto"), (None, None)])
def test_a_field_of_several_kinds_takes_the_first_that_fits(given, weight):
    assert from_plain(Weighted, {"weight": given}).weight == weight


def test_a_field_of_several_kinds_names_them_all():
    with pytest.raises(
        CodecError, match=r"^weight: expected a number, .*; or expected one of auto"
    ):
        from_plain(Weighted, {"weight": "atuo"})


def test_a_missing_field_is_missed_unless_defaults_may_fill_it():
    with pytest.raises(CodecError, match="parts: missing"):
        from_plain(Outer, {"name": "a", "kind": "left", "inner": {"size": 1, "ratio": 1}})
    with pytest.raises(CodecError, match="not JSON"):
        from_json(Outer, b"{")
