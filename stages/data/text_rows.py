"""Checks rows of data files: text rows, rejected rows with a reason, prompts to sample from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ...schemas.rows import BadRow, Rejected, Text, TextRow
from ...schemas.samples import SAMPLE_COLUMNS, Prompt
from .cells import (
    UNWRAPPED,
    Wrapping,
    read_number,
    read_options,
    read_system,
    read_tools,
    require_characters,
    unmarked,
)
from .columns import KNOWN, prompt_shapes
from .files import InputFile, rows_of
from .readers import MOST_CHARACTERS, TOO_DEEP, WHOLE_FILE, FilePart, Row
from .row_parts import Cells
from .shapes import OPTIONAL, DataShape, Shape, read_prompt_alone, read_row


def read_text_rows(inputs: Sequence[InputFile], shape: Shape) -> Iterator[TextRow | Rejected]:
    """Every row of the files in order, checked or rejected; `file` is a file's index."""
    for number, file in enumerate(inputs):
        yield from text_rows_in(file, shape, number)


def text_rows_in(
    file: InputFile, shape: Shape, identity: int, part: FilePart = WHOLE_FILE
) -> Iterator[TextRow | Rejected]:
    """Every row of a file or of a part of it, numbered from the part's start."""
    for row, cells in enumerate(rows_of(file, shape.columns, part)):
        yield text_row_of(cells, shape, identity, row)


BATCH_ROWS, BATCH_CHARACTERS = 1000, 8 << 20


def in_batches(found: Iterable[TextRow | Rejected]) -> Iterator[list[TextRow | Rejected]]:
    """The rows in batches, limited by their number and by their characters of text."""
    batch, size = list[TextRow | Rejected](), 0
    for one in found:
        batch.append(one)
        if isinstance(one, TextRow):
            size += sum(map(_length, (one.prompt, *one.completions)))
        if len(batch) == BATCH_ROWS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def first_text_rows(inputs: Sequence[InputFile], shape: Shape) -> Iterator[TextRow]:
    """The first few usable rows of each file."""
    for file in inputs:
        usable = (one for one in text_rows_in(file, shape, 0) if isinstance(one, TextRow))
        yield from islice(usable, 16)


def text_row_of(cells: Row | BadRow, shape: Shape, file: int, row: int) -> TextRow | Rejected:
    """A checked row, or its rejection."""
    try:
        if isinstance(cells, BadRow):
            raise cells
        one = Cells(cells, shape.source, shape.wrap)
        given, answers, roles, scores, margin = read_row(one, shape.declared)
        prompt, tools, options = _asked(one, shape.declared, given)
        carried = {
            name: margin if name == shape.declared.margin else read_number(*one(name))
            for name in shape.carried
        }
        if (size := sum(map(_length, (prompt, *answers)))) > MOST_CHARACTERS:
            what = f"the row has {size:,} characters, more than {MOST_CHARACTERS:,}"
            raise BadRow("too_large", what)
    except BadRow as bad:
        return bad.at(file, row)
    except RecursionError:
        return Rejected(file, row, "schema", TOO_DEEP)
    learned = tuple(map(_learned, answers))
    if any(learned):
        answers = tuple(map(unmarked, answers))
    else:
        learned = ()
    return TextRow(file, row, prompt, answers, roles, scores, tools, options, carried, learned)


def _length(text: Text) -> int:
    """The number of characters of a text or of a conversation's messages."""
    if isinstance(text, str):
        return len(text)
    return sum(len(message.get("content") or "") for message in text)


def _learned(completion: Text) -> tuple[bool, ...] | None:
    """The learned messages of a completion; None if all are."""
    for message in () if isinstance(completion, str) else completion:
        if "loss" in message:
            return tuple("loss" not in each for each in completion)
    return None


def _asked(
    cells: Cells, shape: DataShape, given: Text
) -> tuple[Text, tuple[Any, ...] | None, Mapping[str, Any]]:
    """The prompt with its system message, and the chat template's tools and options."""
    prompt = unmarked(cells.wrap.prompt(given, cells.source.get("prompt", "prompt")))
    system, tools, options = cells("system"), cells(shape.tools), cells("chat_template_kwargs")
    if not (system[0] or tools[0] or options[0]):
        return prompt, None, {}
    if isinstance(prompt, str):
        beside = zip(OPTIONAL, (system, tools, options), strict=True)
        found = [(name, repr(column)) for name, (value, column) in beside if value]
        raise BadRow(
            "schema",
            f"{', '.join(column for _, column in found)} can only be used when the prompt is a "
            "conversation: data.wrap=chat turns text into one, "
            f"{' '.join(f'--map {name}=' for name, _ in found)} leaves it out",
        )
    if said := read_system(*system):
        if isinstance(given, str):
            cells.wrap.require_unrendered(said, system[1])
        if prompt[0]["role"] == "system":
            raise BadRow("schema", f"{system[1]!r} is given, but the prompt has a system message")
        prompt = ({"role": "system", "content": said}, *prompt)
    return prompt, read_tools(*tools), read_options(*options)


@dataclass
class PromptRows:
    """The prompts of all rows in order, and the rows that cannot be used."""

    prompts: list[Prompt] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)  # `file` is the index of the input
    not_carried: tuple[str, ...] = ()  # columns named like one of a table of samples

    @property
    def rows_in(self) -> int:
        """The number of rows, good and bad."""
        return len(self.prompts) + len(self.rejected)


def read_prompts(
    inputs: Sequence[InputFile], mapped: Mapping[str, str], wrap: Wrapping = UNWRAPPED
) -> PromptRows:
    """The prompt of each row as stage 1 reads it, with the columns that are not preference data.

    `mapped` gives the user's name for align's columns, `wrap` the handling of plain text.
    """
    rows = PromptRows()
    clashes: dict[str, None] = {}
    ours = {theirs: name for name, theirs in mapped.items() if theirs}
    left_out = {name for name, theirs in mapped.items() if not theirs}
    for number, (file, found) in enumerate(zip(inputs, prompt_shapes(inputs, mapped), strict=True)):
        shape = replace(found, wrap=wrap)
        asked = found.declared.prompt or found.declared.answers
        heads = {name.partition(".")[0] for name in (*asked.columns, *asked.optional, *OPTIONAL)}
        known = {*left_out, *(shape.source[name] for name in heads if name in shape.source)}
        for row, cells in enumerate(rows_of(file, file.columns)):
            try:
                if isinstance(cells, BadRow):
                    raise cells
                one = Cells(cells, shape.source, shape.wrap)
                given = read_prompt_alone(one, shape.declared)
                prompt, tools, options = _asked(one, shape.declared, given)
                # Keys that only later rows of a JSON file have are carried too.
                carried = {
                    ours.get(column, column): value
                    for column, value in cells.items()
                    if column not in known and ours.get(column, column) not in KNOWN
                }
                for name in [name for name in carried if name in SAMPLE_COLUMNS]:
                    clashes[name] = None
                    del carried[name]
                for name, value in carried.items():
                    require_characters(value, name)
            except BadRow as bad:
                rows.rejected.append(bad.at(number, row))
            except RecursionError:
                rows.rejected.append(Rejected(number, row, "schema", TOO_DEEP))
            else:
                rows.prompts.append(Prompt(prompt, tools, options, carried))
    rows.not_carried = tuple(clashes)
    return rows
