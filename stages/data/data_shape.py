"""A shape of rows: the columns that identify it, and the function that reads a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

from ...schemas.rows import Role, Text
from .chat_wrap import UNWRAPPED, Wrapping

Cells: TypeAlias = dict[str, Any]  # of a row, by the user's columns


@dataclass(frozen=True)
class ReadRow:
    """A prompt and its completions; of each its role, and its score where there is one."""

    prompt: Text
    completions: tuple[Text, ...]
    roles: tuple[Role, ...]
    scores: tuple[float | None, ...]
    more: Cells = field(default_factory=dict)  # cells of ours that stood elsewhere in the row


@dataclass(frozen=True)
class DataShape:
    """A shape that is declared: everything that is asked of it, wherever it is asked."""

    name: str
    columns: tuple[str, ...]  # that a file of it has; without a prompt, it may have one
    read: Callable[[Cells, Shape], ReadRow]  # raises BadRow
    scores: tuple[str, ...] = ()  # columns of scores that it may have as well
    has_labels: bool = False  # it says which completions are good
    is_single: bool = False  # a completion in a row
    is_foreign: bool = False  # read by the commands before stage 1 alone, by the columns it has
    is_public: bool = False  # of others too, and read by stage 1 as it is, without --map
    may_have: tuple[str, ...] = ()  # further columns that are part of its prompt
    gives: tuple[str, ...] = ()  # numbers of ours that its rows are given
    one_meaning: bool = False  # read by other names, its columns would be silently wrong
    refusal: str = ""  # instead of reading it: the ways that are open
    becomes: tuple[str, ...] = ()  # what each column is read as; empty: what it is called

    @property
    def is_long(self) -> bool:
        """Whether scored completions of one prompt stand in rows that are to be joined."""
        return self.is_single and not self.has_labels


@dataclass(frozen=True)
class Shape:
    """The shape of a run's rows, and the columns they are read from."""

    declared: DataShape
    source: Mapping[str, str]  # our column: the user's column
    optional: tuple[str, ...] = ()  # optional columns that were seen, by our names
    carried: tuple[str, ...] = ()  # numeric columns kept with each row, by our names
    has_prompt: bool = True  # False: the prompt is what the completions have in common
    unread: tuple[str, ...] = ()  # the user's columns that look like scores and are not read
    wrap: Wrapping = UNWRAPPED  # what becomes of plain text
    left_out: tuple[str, ...] = ()  # the user's columns that the user left out
    unwatched: frozenset[str] | None = None  # those that no row is watched for; None: any
    noted: tuple[str, ...] = ()  # unread ones without free text, to be named in a note

    @property
    def kind(self) -> str:
        """Its name."""
        return self.declared.name

    @property
    def columns(self) -> tuple[str, ...]:
        """The user's columns to read, where a file has them."""
        return tuple(self.source.values())

    @property
    def told(self) -> str:
        """Which of the user's columns are read as what."""
        declared = self.declared
        of_ours = declared.becomes or declared.columns
        theirs = map(self.source.__getitem__, declared.columns)
        named = [*zip(theirs, of_ours, strict=True)]
        if "prompt" not in declared.columns and not declared.becomes:
            begun = "what both begin with"
            named.insert(0, (self.source["prompt"] if self.has_prompt else begun, "prompt"))
        done = {*declared.columns, *declared.gives}
        extra = (*declared.scores, *self.optional, *self.carried)
        named += [(self.source[n], n) for n in extra if n in self.source and n not in done]
        groups = groupby(named, key=lambda each: each[1])
        joined = [(" and ".join(each for each, _ in group), ours) for ours, group in groups]
        each = ", ".join(one if one == ours else f"{one} -> {ours}" for one, ours in joined)
        return f"{declared.name} rows: {each}"

    @property
    def lacks_scores(self) -> bool:
        """Whether nothing says which completions are good, though a column of scores would."""
        scores = self.declared.scores
        return not self.declared.has_labels and any(name not in self.source for name in scores)
