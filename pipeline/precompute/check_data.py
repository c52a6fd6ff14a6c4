"""`align check`: the detected shape of data, rows as a model reads them, and dropped rows.

It reads every row and scores none. With a model's folder, rows are tokenized as by
`precompute-ref`; without one, only their shape is checked.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import polars as pl
from numpy.typing import NDArray
from rich.text import Text

from ...schemas.config import Config
from ...schemas.errors import counted
from ...schemas.row_table import Rows
from ...schemas.rows import TIE, Rejected, Role, TextRow
from ...stages.data.cells import Wrapping, template_unused
from ...stages.data.columns import common_shape, not_read, require_scores
from ...stages.data.encode import Encoder
from ...stages.data.files import InputFile, inputs_of
from ...stages.data.preview import lines_of
from ...stages.data.row_keys import EncodedRow, key_rows, prompt_keys_of
from ...stages.data.shapes import Shape
from ...stages.data.text_rows import in_batches, read_text_rows
from ...stages.data.tokenizer import TextTokenizer, load_tokenizer
from ...stages.report.cache_summary import class_weights, spread_of, weight_facts
from ...stages.report.text_tables import facts, grid, heading, share, spreads, worded
from ...stages.tracking.progress import Progress
from ..jobs.rejected_rows import RejectedRows, first_rejected
from ..options.settings import flatten
from ..options.settings_table import as_flags, reads
from .prepare import OF_TEXT, worth_noting

SHOWN = 3  # rows of either kind


@dataclass
class Checked:
    """The findings of a check; with lengths if there is a tokenizer."""

    inputs: tuple[InputFile, ...]
    shape: Shape
    tokenizer: TextTokenizer | None
    config: Config
    rows_in: int = 0
    usable: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    rejected: list[Rejected] = field(default_factory=list)  # the first ones
    notes: Counter[str] = field(default_factory=Counter)
    roles: Counter[Role] = field(default_factory=Counter)
    seen: set[bytes | str] = field(default_factory=set)  # a digest of each row
    prompts: set[bytes] = field(default_factory=set)
    first: list[Rows] = field(default_factory=list)
    # Of prompts, and of completions by their role.
    lengths: dict[str, list[NDArray[np.int64]]] = field(default_factory=dict)

    def drop(self, found: Sequence[object]) -> None:
        """Counts rejected rows, and keeps the first few."""
        rejected = [one for one in found if isinstance(one, Rejected)]
        self.reasons.update(one.reason for one in rejected)
        faults = (one for one in rejected if one.reason != TIE)
        self.rejected = [*self.rejected, *faults][:SHOWN]

    def add(self, text_rows: Sequence[TextRow]) -> None:
        """Counts rows that were not tokenized."""
        if not text_rows:
            return
        self.usable += len(text_rows)
        self.roles.update(role for row in text_rows for role in row.roles)
        keys = prompt_keys_of(text_rows)
        self.prompts.update(keys.tolist())
        for row, key in zip(text_rows, keys.tolist(), strict=True):
            content = repr((key, row.completions, row.roles, row.scores))
            self.seen.add(blake2b(content.encode(), digest_size=16).digest())

    def add_tokens(self, rows: Rows) -> None:
        """Counts rows as a model reads them, and keeps the first few."""
        if not len(rows):
            return
        self.usable += len(rows)
        self.roles.update(map(Role, rows.roles.tolist()))
        self.seen.update(rows.ids())
        self.prompts.update(rows.prompt_key.tolist())
        self._lengths_of("prompt", rows.prompts.lengths)
        for role in np.unique(rows.roles).tolist():
            is_role = rows.roles == role
            self._lengths_of(Role(role).name.lower(), rows.completions.lengths[is_role])
            if rows.learned is not None:
                self._lengths_of(f"{Role(role).name.lower()}, learned", rows.num_learned[is_role])
        missing = SHOWN - len(self.first)
        self.first += [rows.between(row, row + 1) for row in range(min(missing, len(rows)))]

    def _lengths_of(self, name: str, lengths: NDArray[np.int64]) -> None:
        self.lengths.setdefault(name, []).append(lengths)

    def lines(self) -> Iterator[str | Text]:
        """The lines to print; rows as a model reads them come first."""
        names = {number: file.path.name for number, file in enumerate(self.inputs)}
        if self.tokenizer:
            for row in self.first:
                file, side = names[int(row.file[0])], self.config.tokens.prompt_side
                yield from lines_of(row, self.tokenizer, file=file, prompt_side=side)

        yield heading("rows")
        yield f"  {self.usable:,} of {self.rows_in:,} can be used, read as {self.shape.read_as}"
        for reason, count in self.reasons.most_common():
            if reason == TIE:
                yield f"  left out: {counted(count, 'ties')}, which have no chosen answer"
            else:
                yield f"  dropped: {count:,} {reason}"
        yield from (f"    {line}" for line in first_rejected(self.rejected, names.__getitem__))
        repeated = counted(self.usable - len(self.seen), "rows")
        yield f"  {repeated} repeat another; {counted(len(self.prompts), 'different prompts')}"

        if self.lengths:
            yield heading("tokens")
            found = {name: np.concatenate(parts) for name, parts in self.lengths.items()}
            each = [(name, spread_of(pl.Series(lengths))) for name, lengths in found.items()]
            yield from spreads("", each, decimals=0)

        yield heading("completions")
        counts = {role.name.lower(): count for role, count in sorted(self.roles.items())}
        total = self.roles.total()
        shares = [(name, f"{count:,}", share(count, total)) for name, count in counts.items()]
        yield from grid(("", "count", "share"), shares)
        if weights := class_weights(counts):
            yield from facts(weight_facts(weights))

        yield from (f"note: {note}" for note in self._notes())
        if not self.dropped.exceed_limit:
            yield f"next: align precompute-ref {' '.join(self._given())}"

    def _notes(self) -> Iterator[str]:
        texts = self.notes[OF_TEXT]
        if texts and self.config.data.wrap == "auto" and self.tokenizer and self.tokenizer.chat:
            yield template_unused(texts, "rows")
        for note, count in sorted(worth_noting(self.notes).items()):
            yield counted(count, worded(note))
        if self.shape.unread:
            yield not_read(self.shape.unread)

    @property
    def dropped(self) -> RejectedRows:
        """The counts of dropped rows; `precompute-ref` refuses too many."""
        return RejectedRows(self.reasons, self.rows_in, self.config.data.max_bad_frac)

    def _given(self) -> Iterator[str]:
        """The arguments that read the same data in the same way."""
        values, defaults = flatten(self.config), flatten(Config())
        changed = {
            name: value
            for name, value in values.items()
            if reads("check", name) and name != "data.files" and value != defaults[name]
        }
        yield shlex.join(self.config.data.files)
        yield as_flags({"model.path": "DIR"} | changed, "precompute-ref")


def check_data(config: Config, *, progress: Progress) -> Checked:
    """Reads all rows of the data; makes the same refusals as `precompute-ref` before scoring."""
    inputs = inputs_of(config.data)
    shape = common_shape(inputs, config.data.map, config.data.carry)
    require_scores(inputs, shape)
    model = config.model.path
    tokenizer = load_tokenizer(model, config.tokens) if model else None
    wrap = config.data.wrap
    shape = replace(shape, wrap=tokenizer.wrapping(wrap) if tokenizer else Wrapping.of(wrap))
    found = Checked(inputs, shape, tokenizer, config)
    encoder = Encoder(tokenizer, config.tokens) if tokenizer else None
    progress.begin("reading", total=None, unit="rows")
    for batch in in_batches(read_text_rows(inputs, shape)):
        text_rows = [one for one in batch if isinstance(one, TextRow)]
        found.rows_in += len(batch)
        if tokenizer and text_rows and text_rows[0].is_conversation:
            tokenizer.require_template()
        if encoder:
            encoded = [*encoder.encode(batch)]
            found.drop(encoded)
            rows = [one for one in encoded if isinstance(one, EncodedRow)]
            found.notes.update(note for row in rows for note in row.notes)
            found.add_tokens(key_rows(rows, carried=shape.carried))
        else:
            found.drop(batch)
            found.add(text_rows)
        progress.advance(len(batch))
    progress.end()
    return found
