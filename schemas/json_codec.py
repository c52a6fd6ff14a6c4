"""Frozen dataclasses to canonical JSON and back, and options from settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from .errors import closest, did_you_mean

T = TypeVar("T")


class CodecError(ValueError):
    """A value that does not fit its field; the message names the field, and so does `where`."""

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.where = where


def to_json(value: Any) -> str:
    """The canonical JSON of a value: sorted keys, no spaces, a newline at the end."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def digest(value: Any, *, without: Collection[str] = ()) -> str:
    """The sha256 of a value's canonical JSON; of a record without some of its fields."""
    plain = _plain(value)
    if without:
        plain = {name: one for name, one in plain.items() if name not in without}
    return hashlib.sha256(to_json(plain).encode()).hexdigest()


def to_signed_json(record: Any) -> str:
    """The canonical JSON of a record with the digest of all its fields."""
    return to_json({**dataclasses.asdict(record), "digest": digest(record)})


def from_json(cls: type[T], text: str | bytes) -> T:
    """The record that `to_json` wrote; any other byte is a CodecError."""
    return _as_written(cls, _parsed(text), text, to_json)


def from_signed_json(cls: type[T], text: str | bytes, version: int | None = None) -> T:
    """The record that `to_signed_json` wrote; any other byte is a CodecError."""
    plain = _parsed(text)
    if isinstance(plain, dict):
        plain.pop("digest", None)
        made = plain.get("format_version", version)
        if version is not None and isinstance(made, int) and made != version:
            raise CodecError(f"it has format {made}, and this align reads {version}")
    return _as_written(cls, plain, text, to_signed_json)


def from_plain(cls: type[T], plain: dict[str, Any], *, where: str = "") -> T:
    """Options from settings; missing ones have their defaults."""
    require_plain(plain, where)
    try:
        # As JSON: pydantic's strict mode takes a mapping for a dataclass from there alone.
        read = _reader(cls).validate_json(json.dumps(plain), strict=True, extra="forbid")
    except ValidationError as error:
        raise _refusal(cls, error, where) from error
    return cast("T", read)


def json_schema(cls: type[Any]) -> dict[str, Any]:
    """The JSON Schema of a dataclass: types, bounds, choices, help and defaults."""
    schema = _reader(cls).json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part["additionalProperties"] = False
    return schema


def allowed(part: dict[str, Any]) -> str:
    """The allowed values of a field, in words, from its part of a JSON Schema."""
    if "anyOf" in part:
        return " or ".join(allowed(one) for one in part["anyOf"] if one != {"type": "null"})
    if choices := _choices(part):
        return " or ".join(choices)
    kind = KINDS[part.get("type", "object")]
    found = [f"{words} {part[name]:g}" for name, words in BOUNDS.items() if name in part]
    limits = " and ".join(found)
    return f"{kind} of {limits}" if limits.startswith("at") else f"{kind} {limits}".rstrip()


def unknown_key(where: str, key: str, names: list[str]) -> str:
    """The message for an unknown key, with the closest known one."""
    hint = did_you_mean(closest(key, names)) or f" Known: {', '.join(names)}"
    return f"unknown key '{where}'.{hint}"


KINDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}


_reader: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if hasattr(value, "__dataclass_fields__") else value


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {error}") from error


def _as_written(cls: type[T], plain: Any, text: str | bytes, write: Callable[[Any], str]) -> T:
    """The record of a text; refused if writing it again gives another text."""
    try:
        value = _reader(cls).validate_python(plain, extra="forbid")
        written = write(value)
    except ValidationError as error:
        raise _refusal(cls, error, "") from error
    except ValueError as error:  # a number that JSON has no word for
        raise CodecError(str(error)) from error
    if written.encode() != (text.encode() if isinstance(text, str) else text):
        raise CodecError("it is not what was written")
    return cast("T", value)


def require_plain(value: Any, where: str = "") -> None:
    """Refuses values that no setting can have, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            named = _join(where, str(key))
            if not isinstance(key, str) or _fault_of(key):
                message = f"{where or 'top'}: {key!r:.60} is a name that is not plain text"
                raise CodecError(message, where=named)
            require_plain(item, named)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_plain(item, f"{where}[{index}]")
    elif fault := _fault_of(value):
        raise CodecError(f"{where} is {fault}", where=where)


def _fault_of(value: Any) -> str:
    if isinstance(value, str) and any(one == "\0" or "\ud800" <= one <= "\udfff" for one in value):
        return f"{value!r:.60}: not plain text. Write it in UTF-8."
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}; it must be finite."
    if isinstance(value, int) and abs(value) >= 1 << 63:
        # Python writes no integer of thousands of digits.
        bits = value.bit_length()
        shown = str(value) if bits < 10_000 else f"of {bits:,} bits"
        return f"{shown:.60}; it cannot be that large."
    return "" if isinstance(value, str | float | int | None) else f"{_named(value)}: not plain."


def _refusal(cls: type[Any], error: ValidationError, where: str) -> CodecError:
    """The first validation error as a message: its field, what is allowed and what was found."""
    first = error.errors(include_url=False)[0]
    schema = json_schema(cls)
    part = schema
    for step in first["loc"]:
        inside = _inside(_resolved(part, schema), step)
        if inside is None:  # an unknown key, or the name of a type among several
            break
        part, where = inside, f"{where}[{step}]" if isinstance(step, int) else _join(where, step)
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        key = str(first["loc"][-1])
        where, known = _join(where, key), list(_resolved(part, schema)["properties"])
        return CodecError(unknown_key(where, key, known), where=where)
    if first["type"] == "missing":
        return CodecError(f"{where}: missing", where=where)
    if first["type"] == "json_invalid":
        return CodecError(f"{where or 'top'}: {first['ctx']['error']}", where=where)
    found = f"expected {allowed(part)}, found {_named(first['input'])}"
    hint = did_you_mean(closest(str(first["input"]), _choices(part)))
    message = f"{where or 'top'}: {found}{'.' + hint if hint else ''}"
    return CodecError(message, where=where)


def _resolved(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The part itself, or the definition that it refers to, also of a record that may be null."""
    named = [one["$ref"] for one in (part, *part.get("anyOf", ())) if "$ref" in one]
    return schema["$defs"][named[0].rpartition("/")[2]] if named else part


def _inside(part: dict[str, Any], step: int | str) -> dict[str, Any] | None:
    """The schema of an item or a field; None if there is no such field."""
    every = part.get("items" if isinstance(step, int) else "additionalProperties")
    inside = part.get("properties", {}).get(step, every)
    return inside if isinstance(inside, dict) else None


def _choices(part: dict[str, Any]) -> list[str]:
    one = [part["const"]] if "const" in part else part.get("enum", [])
    return [*map(str, one), *(name for kind in part.get("anyOf", []) for name in _choices(kind))]


def _named(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"[:100]


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
