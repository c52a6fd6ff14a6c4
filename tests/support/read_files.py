"""The rows of data files, as stage 1 reads them."""

from align.schemas.errors import AlignError
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.input_files import data_bytes, iter_slice, open_inputs, slices_of


def read_in_slices(path, **options):
    """The records and the rejected rows of a file."""
    records, rejected = [], []
    for good, bad in read_by_chunk(path, **options):
        records += good
        rejected += bad
    return records, rejected


def read_by_chunk(path, **options):
    """Yields those of each chunk; what several slices read to divide it is read once here."""
    inputs = open_inputs([str(path)], **options)
    shape = common_shape(inputs, {})
    for part in slices_of(inputs, shape.columns, total=data_bytes(inputs, shape.columns)):
        if part.part == 0:
            for chunk, _ in iter_slice(inputs, part, shape.columns):
                yield parse_chunk(chunk, shape)


def read_with_flips(path, rows):
    """Reads a Parquet file with one bit of its footer flipped, for each byte of that."""
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little")
    for byte in range(len(whole) - 8 - footer, len(whole)):
        broken = bytearray(whole)
        broken[byte] ^= 1 << byte % 8
        path.write_bytes(broken)
        try:
            records, rejected = read_in_slices(path)
        except AlignError:
            continue
        assert len(records) + len(rejected) == rows, byte
