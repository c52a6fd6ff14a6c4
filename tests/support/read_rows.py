"""Rows of data as a person writes them, the records that they become, and the tokens of these."""

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from align.schemas.data_options import TokenOptions
from align.schemas.rows import Rejected, Role, TextRow
from align.stages.data.cells import UNWRAPPED
from align.stages.data.columns import common_shape, detect_shape
from align.stages.data.encode import Encoder
from align.stages.data.files import InputFile, open_inputs
from align.stages.data.text_rows import read_text_rows
from align.stages.data.tokenizer import load_tokenizer


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def write_rows(path, rows, **options):
    """Writes rows as the ending of the path says; options are those of Parquet."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in rows:
                cells = row.items()
                writer.writerow({k: json.dumps(v) if isinstance(v, list) else v for k, v in cells})
    elif path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, **options)
    else:
        table = pa.table(columns)
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    return str(path)


def shape_of(columns, *, wrap=UNWRAPPED, mapped=None, carry=()):
    """The shape of a file with these columns."""
    return replace(detect_shape([*columns], mapped or {}, carry, where="a.csv"), wrap=wrap)


def parted(found):
    """The rows that can be used, and the rejected ones."""
    every = [*found]
    rejected = [one for one in every if isinstance(one, Rejected)]
    return [one for one in every if not isinstance(one, Rejected)], rejected


def read_file(path):
    """The records and the rejected rows of a file."""
    inputs = open_inputs([str(path)])
    return parted(read_text_rows(inputs, replace(common_shape(inputs, {}), wrap=UNWRAPPED)))


def read_lines(*rows, columns=None, **options):
    """What becomes of lines of JSON; bytes stand as they are."""
    texts = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(b"\n".join(texts))
        file = InputFile(path, ".jsonl", 1)
        return parted(read_text_rows([file], shape_of(columns or rows[0], **options)))


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


USER = user("hi")


def conversation(*completions, prompt=(USER,), **more):
    """A record of candidates without scores."""
    count = len(completions)
    return TextRow(0, 0, prompt, completions, (Role.CANDIDATE,) * count, (None,) * count, **more)


def encode(folder, *records, **options):
    """The rows of records under the tokenizer of a folder, the rejected ones, and notes."""
    rules = TokenOptions(**options)
    rows, rejected = parted(Encoder(load_tokenizer(folder, rules), rules).encode(records))
    return rows, rejected, Counter(note for row in rows for note in row.notes)


def encode_one(folder, record, **options):
    """The row of a record, and what is noted of it."""
    (row,), rejected, notes = encode(folder, record, **options)
    assert not rejected
    return row, notes


def texts_of(folder, record, **options):
    """The prompt and its completions as the texts of their tokens, and what is noted."""
    row, notes = encode_one(folder, record, **options)
    decode = load_tokenizer(folder, TokenOptions()).hf.decode
    return [decode(ids) for ids in (row.prompt, *row.completions)], notes


def refusal_of(folder, record, **options):
    """Why a record cannot be encoded."""
    rows, (bad,), _ = encode(folder, record, **options)
    assert not rows
    return bad
