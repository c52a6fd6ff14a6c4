"""Frozen dataclasses to canonical JSON and back, with every type checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from typing import Any, TypeVar

from .errors import closest, did_you_mean

T = TypeVar("T")
LARGEST = 10**300  # as a float it would soon be infinite


class CodecError(ValueError):
    """A value that does not fit its field; the message names the field, and so does `where`."""

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.where = where


def to_json(value: Any) -> str:
    """One canonical text per value: sorted keys, no spare blanks, a newline at the end."""
    plain = dataclasses.asdict(value) if hasattr(value, "__dataclass_fields__") else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def digest(value: Any) -> str:
    """The sha256 of a value's canonical JSON."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()


def digest_of(record: Any, *without: str) -> str:
    """The digest of a dataclass's content but for some of its fields, such as the digest itself."""
    plain = dataclasses.asdict(record)
    for name in without:
        del plain[name]
    return digest(plain)


def from_json(cls: type[T], text: str | bytes) -> T:
    """Reads what `to_json` wrote; anything else is a CodecError."""
    return from_plain(cls, _parsed(text))


def to_signed_json(value: Any) -> str:
    """Like `to_json`, with a digest over all of it; for records that are rewritten in place."""
    plain = dataclasses.asdict(value)
    return to_json({**plain, "digest": digest(plain)})


def from_signed_json(cls: type[T], text: str | bytes) -> T:
    """Reads what `to_signed_json` wrote; any other byte is a CodecError."""
    plain = _parsed(text)
    stored = plain.pop("digest", None) if isinstance(plain, dict) else None
    value = from_plain(cls, plain)
    if stored != digest(plain) or to_signed_json(value).encode() != _bytes(text):
        raise CodecError("it is not what was written (its digest differs)")
    return value


def version_in(text: str | bytes) -> int | None:
    """The `format_version` that a record claims, whatever else is wrong with it."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        return None
    version = plain.get("format_version") if isinstance(plain, dict) else None
    return version if isinstance(version, int) else None


def from_plain(cls: type[T], plain: Any, *, where: str = "", partial: bool = False) -> T:
    """Builds a dataclass from dicts and lists; `partial` lets defaults fill what is missing."""
    if not isinstance(plain, dict):
        raise CodecError(
            f"{where or 'top'}: expected a mapping, found {_named(plain)}", where=where
        )
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in plain:
        if key not in names:
            name = _join(where, str(key))
            raise CodecError(unknown_key(name, str(key), names), where=name)
    missing = [name for name in names if name not in plain]
    if missing and not partial:
        name = _join(where, missing[0])
        raise CodecError(f"{name}: missing", where=name)
    values = {
        key: _convert(hints[key], value, _join(where, key), partial=partial)
        for key, value in plain.items()
    }
    return cls(**values)


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {error}") from error


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def unknown_key(where: str, key: str, names: list[str]) -> str:
    """Says that a key is unknown, and which known one it may be."""
    hint = did_you_mean(closest(key, names)) or f" Known: {', '.join(names)}"
    return f"unknown key '{where}'.{hint}"


def _convert(hint: Any, value: Any, where: str, *, partial: bool) -> Any:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        empty = {} if partial and value is None else value
        return from_plain(typing.cast("type[Any]", hint), empty, where=where, partial=partial)
    if origin is typing.Literal:
        return _one_of(arguments, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        kinds = [argument for argument in arguments if argument is not type(None)]
        return _first_fit(kinds, value, where, partial=partial)
    if origin in (list, tuple):
        return _sequence(origin, arguments[0], value, where, partial=partial)
    if origin is dict:
        _require(isinstance(value, dict), where, "a mapping", value)
        return {
            str(key): _convert(arguments[1], item, _join(where, str(key)), partial=partial)
            for key, item in value.items()
        }
    return _scalar(hint, value, where)


def _first_fit(hints: list[Any], value: Any, where: str, *, partial: bool) -> Any:
    refusals = []
    for hint in hints:
        try:
            return _convert(hint, value, where, partial=partial)
        except CodecError as error:
            refusals.append(str(error))
    first, *others = refusals
    reasons = [first, *(text.removeprefix(f"{where}: ") for text in others)]
    raise CodecError("; or ".join(reasons), where=where)


def _sequence(kind: Any, item_hint: Any, value: Any, where: str, *, partial: bool) -> Any:
    _require(isinstance(value, list | tuple), where, "a list", value)
    return kind(
        _convert(item_hint, item, f"{where}[{index}]", partial=partial)
        for index, item in enumerate(value)
    )


def _one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value not in choices:
        listed = ", ".join(map(str, choices))
        hint = did_you_mean(closest(str(value), map(str, choices)))
        message = f"{where}: expected one of {listed}; found {_named(value)}.{hint}"
        raise CodecError(message, where=where)
    return value


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        _require(abs(value) < LARGEST, where, "a smaller number", value)
        return float(value)
    wanted = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    fits = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    _require(fits, where, wanted.get(hint, str(hint)), value)
    return value


def _require(fits: bool, where: str, wanted: str, value: Any) -> None:
    if not fits:
        raise CodecError(f"{where}: expected {wanted}, found {_named(value)}", where=where)


def _named(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"[:100]


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
