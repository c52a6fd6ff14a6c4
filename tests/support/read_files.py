"""The rows of data files, as stage 1 reads them."""

from align.stages.data.columns import common_shape
from align.stages.data.files import open_inputs, slices_of
from align.stages.data.records import records_in
from support.read_rows import parted


def read_in_slices(path):
    """The records and the rejected rows of a file, slice by slice."""
    found, inputs = [], open_inputs([str(path)])
    shape = common_shape(inputs, {})
    for (part,) in slices_of(inputs, shape.columns):
        found += records_in(inputs[part.file], shape, part.file, part)
    return parted(found)
