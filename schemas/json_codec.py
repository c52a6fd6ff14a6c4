"""Frozen dataclasses to canonical JSON and back, and their JSON Schema."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


class CodecError(ValueError):
    """A record that was altered or has wrong fields; the message names the field."""


def to_json(value: Any) -> str:
    """The canonical JSON of a value: sorted keys, no spaces, a newline at the end."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def digest(value: Any, *, without: Collection[str] = ()) -> str:
    """The sha256 of a value's canonical JSON, `without` some fields of a record."""
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


def json_schema(cls: type[Any]) -> dict[str, Any]:
    """The JSON Schema of a dataclass: types, bounds, choices, help and defaults."""
    schema = _reader(cls).json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part["additionalProperties"] = False
    return schema


_reader: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if hasattr(value, "__dataclass_fields__") else value


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {error}") from error


def _as_written(cls: type[T], plain: Any, text: str | bytes, write: Callable[[Any], str]) -> T:
    """The record in a text; refused if writing it again gives another text."""
    try:
        value = _reader(cls).validate_python(plain, extra="forbid")
        written = write(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CodecError(f"{place}: {first['msg']}, found {first['input']!r:.60}") from error
    except ValueError as error:  # NaN or infinity, which JSON cannot write
        raise CodecError(str(error)) from error
    if written.encode() != (text.encode() if isinstance(text, str) else text):
        raise CodecError("it was altered after it was written")
    return cast("T", value)
