"""Rows of data as a person writes them, and the records or the rejections that they become."""

import json

from align.stages.data.chat_wrap import UNWRAPPED
from align.stages.data.data_schema import detect_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.file_formats import JsonRows
from align.stages.data.input_files import Chunk


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def shape_of(columns, *, wrap=UNWRAPPED, rename=None, carry=()):
    """The shape of a file with these columns."""
    shape = detect_shape(list(columns), rename or {}, carry, where="test")
    vars(shape)["wrap"] = wrap
    return shape


def read_lines(*rows, columns=None, **options):
    """What becomes of lines of JSON, the first of which is row 10; bytes stand as they are."""
    texts = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return parse_chunk(Chunk(0, 10, JsonRows(texts)), shape_of(columns or rows[0], **options))


def record_of(row, **options):
    """The record of a row that can be used."""
    (record,), rejected = read_lines(row, **options)
    assert not rejected
    return record


def rejection_of(row, **options):
    """Why a row cannot be used."""
    records, (bad,) = read_lines(row, **options)
    assert not records
    return bad
