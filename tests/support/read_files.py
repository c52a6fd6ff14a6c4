"""The rows of data files, as stage 1 reads them."""

from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.input_files import data_bytes, iter_slice, open_inputs, slices_of


def read_in_slices(path):
    """The records and the rejected rows of a file; what several slices read is read once here."""
    records, rejected = [], []
    inputs = open_inputs([str(path)])
    shape = common_shape(inputs, {})
    for part in slices_of(inputs, shape.columns, total=data_bytes(inputs, shape.columns)):
        if part.part == 0:
            for chunk, _ in iter_slice(inputs, part, shape.columns):
                good, bad = parse_chunk(chunk, shape)
                records += good
                rejected += bad
    return records, rejected
