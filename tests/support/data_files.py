"""Data files of every format, written as other programs do, and read as stage 1 does."""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq

from align.stages.data.columns import common_shape
from align.stages.data.files import open_inputs, slices_of
from align.stages.data.text_rows import text_rows_in
from support.read_rows import parted


def lines(rows):
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def array(rows):
    return json.dumps(rows, indent=2, ensure_ascii=False).encode()


def separated(rows, by=",", mark=b""):
    """Every cell in quotes; one that is null is empty."""
    quoted = [
        ['"{}"'.format((cell or "").replace('"', '""')) for cell in row.values()] for row in rows
    ]
    return mark + "".join(f"{by.join(cells)}\r\n" for cells in ([*rows[0]], *quoted)).encode()


def parquet(rows, kind=None):
    sink = io.BytesIO()
    pq.write_table(table_of(rows, kind), sink, row_group_size=4, write_page_checksum=True)
    return sink.getvalue()


def arrow(rows, kind=None, opener=pa.ipc.new_stream):
    sink, table = io.BytesIO(), table_of(rows, kind)
    with opener(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return sink.getvalue()


def table_of(rows, kind):
    schema = kind and pa.schema([(name, kind) for name in rows[0]])
    return pa.Table.from_pylist(rows, schema)


def gzipped(content):
    """Compressed at no time, so that the names of cases are the same everywhere."""
    return gzip.compress(content, mtime=0)


def zstd(content):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(content)
    return sink.getvalue().to_pybytes()


def read_in_slices(path):
    """The records and the rejected rows of a file, slice by slice."""
    found, inputs = [], open_inputs([str(path)])
    shape = common_shape(inputs, {})
    for (part,) in slices_of(inputs, shape.columns):
        found += text_rows_in(inputs[part.file], shape, part.file, part)
    return parted(found)
