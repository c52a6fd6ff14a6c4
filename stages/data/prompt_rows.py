"""The prompts of data files, which may be preference data of any shape or prompts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...schemas.rows import BadRow, Record, Rejected
from ...schemas.samples import SAMPLE_COLUMNS, Prompt
from .chat_wrap import UNWRAPPED, Wrapping
from .data_schema import PromptColumns, common_shape, prompt_columns
from .data_shape import Cells
from .decode_rows import TOO_DEEP, parse_chunk, read_cells, read_template
from .input_files import InputFile, iter_chunks
from .validate import read_prompt, require_characters


@dataclass
class PromptRows:
    """The prompts of all rows in order, and the rows that cannot be used."""

    prompts: list[Prompt] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)  # their file: index of the input
    not_carried: tuple[str, ...] = ()  # columns whose names are those of a table of samples

    @property
    def rows_in(self) -> int:
        """The number of rows, good and bad."""
        return len(self.prompts) + len(self.rejected)


def read_prompts(
    inputs: Sequence[InputFile], columns: Mapping[str, str], wrap: Wrapping = UNWRAPPED
) -> PromptRows:
    """The prompt of each row, with the columns that are no part of preference data.

    Without a column `prompt` it is the common beginning of chosen and rejected. `columns` gives the
    user's name of each column, `wrap` the handling of plain text.
    """
    found = prompt_columns(inputs, columns)
    pairs = None if "prompt" in found.source else replace(common_shape(inputs, columns), wrap=wrap)
    rows, carried = PromptRows(), _Carried(found)
    read = (*(pairs.columns if pairs else found.source.values()), *carried.columns.values())
    for chunk in iter_chunks(inputs, read):
        rows_of_cells = enumerate(read_cells(chunk.payload, read), start=chunk.row)
        if pairs:
            records, rejected = parse_chunk(chunk, pairs)
            _take_beginnings(rows, records, dict(rows_of_cells), carried)
            rows.rejected += rejected
            continue
        for row, cells in rows_of_cells:
            _take(rows, chunk.file, row, cells, _Columns(found.source, carried, wrap))
    rows.not_carried = tuple(carried.clashes)
    return rows


class _Carried:
    """The cells that are carried along with each prompt: no part of preference data."""

    def __init__(self, found: PromptColumns) -> None:
        self.clashes = dict.fromkeys(name for name in found.carried if name in SAMPLE_COLUMNS)
        self.columns = {n: found.carried[n] for n in found.carried if n not in self.clashes}
        self._known = found.known

    def of(self, cells: Cells) -> dict[str, Any]:
        """The carried cells of a row; a key that the first rows lack is carried too."""
        own = {name: cells.get(column) for name, column in self.columns.items()}
        for name in [name for name in cells if name not in self._known]:
            if name in SAMPLE_COLUMNS:
                self.clashes[name] = None
            else:
                require_characters({name: cells[name]}, name)
                own[name] = cells[name]
        return own


@dataclass(frozen=True)
class _Columns:
    """The columns to read, by our names, and the handling of plain text."""

    source: Mapping[str, str]
    carried: _Carried
    wrap: Wrapping


def _take(rows: PromptRows, file: int, row: int, cells: Cells | BadRow, columns: _Columns) -> None:
    try:
        if isinstance(cells, BadRow):
            raise cells
        rows.prompts.append(_prompt(cells, columns))
    except BadRow as bad:
        rows.rejected.append(Rejected(file, row, bad.reason, bad.detail))
    except RecursionError:
        rows.rejected.append(Rejected(file, row, "schema", TOO_DEEP))


def _prompt(cells: Cells, columns: _Columns) -> Prompt:
    column = columns.source["prompt"]
    text = read_prompt(cells.get(column), column)
    template = read_template(cells, columns.source, text, columns.wrap)
    return Prompt(template.prompt, template.tools, template.options, columns.carried.of(cells))


def _take_beginnings(
    rows: PromptRows,
    records: Sequence[Record],
    cells: Mapping[int, Cells | BadRow],
    carried: _Carried,
) -> None:
    """Appends the common beginning of each pair's completions as a prompt."""
    for one in records:
        try:
            own = cells[one.row]
            if isinstance(own, BadRow):  # in a carried column
                raise own
            prompt = Prompt(one.prompt, one.tools, one.template_options, carried.of(own))
            rows.prompts.append(prompt)
        except BadRow as bad:
            rows.rejected.append(Rejected(one.file, one.row, bad.reason, bad.detail))
