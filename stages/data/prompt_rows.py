"""Reads the prompts of data files, be they preference data of any shape or prompts alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...schemas.rows import BadRow, Record, Rejected
from ...schemas.samples import SAMPLE_COLUMNS, Prompt
from .chat_wrap import UNWRAPPED, Wrapping
from .data_schema import common_shape, prompt_columns
from .decode_rows import TOO_DEEP, Cells, parse_chunk, read_cells, read_template
from .input_files import InputFile, iter_chunks
from .validate import read_prompt


@dataclass
class PromptRows:
    """The prompts of all rows in order, and the rows that cannot be used."""

    prompts: list[Prompt] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)  # their file: which of the inputs
    not_carried: tuple[str, ...] = ()  # columns whose names a table of samples uses itself

    @property
    def rows_in(self) -> int:
        """How many rows there are."""
        return len(self.prompts) + len(self.rejected)


def read_prompts(
    inputs: Sequence[InputFile], columns: Mapping[str, str], wrap: Wrapping = UNWRAPPED
) -> PromptRows:
    """Reads a prompt of each row, and carries the columns that are no part of preference data.

    Without a column `prompt` it is what chosen and rejected both begin with. `columns` gives the
    user's name of each column, `wrap` what becomes of plain text.
    """
    found = prompt_columns(inputs, columns)
    if found is None:
        return _prompts_of_pairs(inputs, columns, wrap)
    clashes = tuple(name for name in found.carried if name in SAMPLE_COLUMNS)
    carried = {name: found.carried[name] for name in found.carried if name not in clashes}
    rows = PromptRows(not_carried=clashes)
    read = (*found.source.values(), *carried.values())
    for chunk in iter_chunks(inputs, read):
        for row, cells in enumerate(read_cells(chunk.payload, read), start=chunk.row):
            _take(rows, chunk.file, row, cells, _Reading(found.source, carried, wrap))
    return rows


@dataclass(frozen=True)
class _Reading:
    """Which columns are read, by our names, and what becomes of plain text."""

    source: Mapping[str, str]
    carried: Mapping[str, str]
    wrap: Wrapping


def _take(rows: PromptRows, file: int, row: int, cells: Cells | BadRow, reading: _Reading) -> None:
    try:
        if isinstance(cells, BadRow):
            raise cells
        rows.prompts.append(_prompt(cells, reading))
    except BadRow as bad:
        rows.rejected.append(Rejected(file, row, bad.reason, bad.detail))
    except RecursionError:
        rows.rejected.append(Rejected(file, row, "schema", TOO_DEEP))


def _prompt(cells: Cells, reading: _Reading) -> Prompt:
    column = reading.source["prompt"]
    text = read_prompt(cells.get(column), column)
    template = read_template(cells, reading.source, text, reading.wrap)
    own = {name: cells.get(column) for name, column in reading.carried.items()}
    return Prompt(template.prompt, template.tools, template.options, own)


def _prompts_of_pairs(
    inputs: Sequence[InputFile], columns: Mapping[str, str], wrap: Wrapping
) -> PromptRows:
    shape = replace(common_shape(inputs, columns), wrap=wrap)
    rows = PromptRows()
    for chunk in iter_chunks(inputs, shape.columns):
        records, rejected = parse_chunk(chunk, shape)
        rows.prompts += _in_order(records)
        rows.rejected += rejected
    return rows


def _in_order(records: Sequence[Record]) -> Iterator[Prompt]:
    return (Prompt(one.prompt, one.tools, one.template_options) for one in records)
