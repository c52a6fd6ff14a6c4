"""Reads the input of judging and selection: a table of align, or a plain file of completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from ...schemas.config import Config
from ...schemas.errors import UsageError, counted, logger
from ...schemas.rows import Rejected, Text, TextRow
from ...schemas.samples import Distribution, Prompt
from ...stages.data.cells import Wrapping
from ...stages.data.columns import common_shape, not_read
from ...stages.data.files import digested, open_inputs, require_unchanged
from ...stages.data.readers import ending_of
from ...stages.data.text_rows import read_text_rows
from ...stages.sample.sample_table import prompt_table, text_column
from ...stages.storage.tables import TableFolder, TableKind, read_table
from ..jobs.object_inputs import with_local_data
from ..jobs.rejected_rows import RejectedRows, first_rejected


@dataclass(frozen=True)
class TableInput:
    """A table of samples, its origin, and the number of unusable rows."""

    table: pl.DataFrame
    kind: str  # the kind of a table of align, or "data" for a plain file
    root: str  # the table's id, or the digest of the file
    unusable: int = 0  # rows
    sampling: Distribution | None = None  # None: unknown

    @property
    def left_out(self) -> dict[str, int]:
        """The unusable rows as a count of the output table."""
        return {"unusable": self.unusable} if self.unusable else {}


def read_input(config: Config, named: str, kind: TableKind) -> TableInput:
    """Reads a folder of align, its table file, or a plain file of completions."""
    parent, _, name = named.rstrip("/").rpartition("/")
    folder = TableFolder.at((parent or ".") if name == f"{kind}.parquet" else named, kind)
    if not ending_of(named) or folder.find():
        manifest, table = read_table(folder)
        return TableInput(table, kind, manifest.root, sampling=manifest.sampling)

    local = with_local_data(replace(config, data=replace(config.data, files=[named])))
    (file,) = open_inputs(local.data.files)
    before = digested(file)
    shape = common_shape([file], config.data.map)
    if shape.declared.kind in ("pair", "label"):
        raise UsageError(
            f"{named} has {shape.name} rows, which need no judge and no selection. Use it with "
            "align precompute-ref."
        )
    if shape.unread:
        logger.warning("%s: %s", named, not_read(shape.unread))
    rows = [*read_text_rows([file], replace(shape, wrap=Wrapping.of(config.data.wrap)))]
    require_unchanged([file], [before])
    rejected = [row for row in rows if isinstance(row, Rejected)]
    if rejected:
        counts = Counter(row.reason for row in rejected)
        limit = RejectedRows(counts, rows_in=len(rows), allowed=config.data.max_bad_frac)
        limit.require_few(first_rejected(rejected, lambda _: named))
        unusable = counted(len(rejected), "rows")
        logger.warning("%s: %s are unusable, the first: %s", named, unusable, rejected[0].detail)
    table = samples_of(row for row in rows if isinstance(row, TextRow))
    if kind == "samples":
        table = table.drop("score")  # judging makes new scores
    return TableInput(table, "data", before.sha256, len(rejected))


def samples_of(text_rows: Iterable[TextRow]) -> pl.DataFrame:
    """A table with a judged sample per completion; rows of one prompt are put together."""
    prompts: dict[str, Prompt] = {}
    answers: dict[str, list[tuple[Text, float | None]]] = {}
    for row in text_rows:
        prompt = Prompt(row.prompt, row.tools, row.template_options)
        key = prompt.key
        prompts.setdefault(key, prompt)
        answers.setdefault(key, []).extend(zip(row.completions, row.scores, strict=True))
    samples = [
        (key, number, completion, score)
        for key, own in answers.items()
        for number, (completion, score) in enumerate(own)
    ]
    keys, numbers, completions, scores = zip(*samples, strict=True)
    table = prompt_table([prompts[key] for key in keys])
    return table.select(
        "prompt",
        pl.Series("prompt_key", keys, pl.String),
        pl.Series("number", numbers, pl.Int32),
        text_column(completions).alias("completion"),
        pl.Series("score", scores, pl.Float64),
        pl.exclude("prompt"),
    )


def plain(text: Text) -> Any:
    """A text, or a conversation as a list of dicts."""
    return text if isinstance(text, str) else [dict(message) for message in text]


def given_to_template(text_row: TextRow) -> dict[str, Any]:
    """The columns tools and chat_template_kwargs of a row, if it has them."""
    tools = {"tools": list(text_row.tools)} if text_row.tools else {}
    options = text_row.template_options
    return tools | ({"chat_template_kwargs": dict(options)} if options else {})
