"""Thrift's compact protocol, in which Parquet writes what its parts hold.

https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

# The ids of the fields that are read, each with those of the struct, or of the structs, in it.
Wanted: TypeAlias = Mapping[int, Any]
ALL: Wanted = {}  # of a field that is no struct
DAMAGED = (LookupError, ValueError, RecursionError)  # what reading anything else ends in
_TRUE, _FALSE, _BYTE, _DOUBLE, _BYTES, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12


def read_struct(content: bytes, at: int, wanted: Wanted) -> tuple[dict[int, Any], int]:
    """The values of a struct by the ids of its fields, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    while head := content[at]:
        at += 1
        if step := head >> 4:
            number += step
        else:
            number, at = _signed(content, at)
        kind = head & 15
        if number in wanted:
            fields[number], at = _value(content, at, kind, wanted[number])
        elif 3 < kind < 7:
            while content[at] > 127:
                at += 1
            at += 1
        else:
            at = _end(content, at, kind)
    return fields, at + 1


def _value(content: bytes, at: int, kind: int, wanted: Wanted) -> tuple[Any, int]:
    if 3 < kind < 7:
        return _signed(content, at)
    if kind == _STRUCT:
        return read_struct(content, at, wanted)
    if kind == _BYTES:
        end = _end(content, at, kind)
        _, at = _unsigned(content, at)
        return content[at:end], end
    if kind in (_LIST, _SET):
        kind, count, at = _items(content, at)
        values = []
        for _ in range(count):
            value, at = _value(content, at, kind, wanted)
            values.append(value)
        return values, at
    return None, _end(content, at, kind)


def _end(content: bytes, at: int, kind: int) -> int:
    """Where a value ends that is passed over."""
    if 3 < kind < 7:
        return _unsigned(content, at)[1]
    if kind == _STRUCT:
        return read_struct(content, at, ALL)[1]
    if kind == _BYTES:
        length, at = _unsigned(content, at)
        if length > len(content) - at:
            raise IndexError
        return at + length
    if kind in (_LIST, _SET):
        kind, count, at = _items(content, at)
        for _ in range(count):
            at = _end(content, at, kind)
        return at
    if kind not in _SIZES:
        raise ValueError
    return at + _SIZES[kind]


_SIZES = {_TRUE: 0, _FALSE: 0, _BYTE: 1, _DOUBLE: 8}  # a field's kind is its truth value


def _items(content: bytes, at: int) -> tuple[int, int, int]:
    """The kind of a list's items, how many there are, and where the first one is."""
    head, at = content[at], at + 1
    count = head >> 4
    if count == 15:
        count, at = _unsigned(content, at)
    if count > len(content) - at:  # each takes a byte at least
        raise IndexError
    kind = head & 15
    return (_BYTE if kind in (_TRUE, _FALSE) else kind), count, at


def _unsigned(content: bytes, at: int) -> tuple[int, int]:
    byte = content[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    while True:
        at += 1
        byte = content[at]
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift > 63:
            return value, at + 1


def _signed(content: bytes, at: int) -> tuple[int, int]:
    value, at = _unsigned(content, at)
    return (value >> 1) ^ -(value & 1), at
