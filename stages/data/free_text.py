"""Detection of free text in columns that are not read, as opposed to numbers, dates and ids."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

SEVERAL = 3  # words
SENTENCE = 5  # words; of fewer, a sentence has a mark at its end
MANY = 12  # words that make a value text whatever is between them
MOST_CHARACTERS = 4000  # of a value that are examined
MOST_VALUES = 8  # of a list
DEEPEST = 8
_MESSAGES = ({"role", "content"}, {"from", "value"})
_LETTERS = re.compile(r"[^\W\d_]{2}")
# Scripts that write no blanks between words, from Thai on; two of their letters count as a word.
_WITHOUT_BLANKS = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\uffef]")
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f][\"'\u201d\u2019)\]]*\Z")


class ColumnSample:
    """Cells of one column; values inside of objects are grouped by their keys."""

    def __init__(self) -> None:
        self.cells = 0  # that are not empty
        self.phrase = ""  # the first phrase
        self.where = ""  # the location of the first phrase
        self.has_messages = False
        self._values: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, cell: Any, where: str) -> None:
        """Adds a cell, which counts if it is not empty."""
        self.cells += not is_empty(cell)
        for path, value in _values(cell):
            if isinstance(value, dict):
                self.has_messages = True
            else:
                self._values[path].append(value)
            if not self.phrase and _is_phrase(value):
                self.phrase, self.where = str(value), where

    @property
    def is_free_text(self) -> bool:
        """Whether the column has messages, or at least half of its distinct values are phrases.

        Most of the phrases have to be distinct, or sentences.
        """
        return self.has_messages or any(map(_is_free_text, self._values.values()))


def is_empty(cell: Any) -> bool:
    """Whether a cell is null, empty or blank."""
    return cell is None or cell in ("", [], {}) or (isinstance(cell, str) and cell.isspace())


def holds_phrase(cell: Any) -> bool:
    """Whether a cell holds several words, or messages."""
    if isinstance(cell, str):
        # Most cells are one word, and every row is examined.
        if cell.isascii() and len(cell.split(None, 1)) < 2 and cell[:1] not in ("[", "{"):
            return False
    elif not isinstance(cell, list | tuple | dict):
        return False
    return any(_is_phrase(value) for _, value in _values(cell))


class Watch:
    """Observes which unread columns are not empty in the rows, and which have phrases."""

    def __init__(self, unwatched: frozenset[str]) -> None:
        self.met: dict[str, bool] = {}  # by column: whether a cell has a phrase
        self._done = set(unwatched)

    def look(self, cells: Mapping[str, Any]) -> None:
        """Observes the cells of a row."""
        for name in cells.keys() - self._done:
            if holds_phrase(cells[name]):
                self.met[name] = True
                self._done.add(name)
            elif name not in self.met and not is_empty(cells[name]):
                self.met[name] = False


def _values(cell: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The texts and messages in a cell, each with the path of its keys."""
    if isinstance(cell, str) and (inner := _from_json(cell)) is not None:
        cell = inner
    if isinstance(cell, str):
        if cell and not cell.isspace():
            yield path, cell[:MOST_CHARACTERS]
    elif isinstance(cell, dict) and any(keys <= cell.keys() for keys in _MESSAGES):
        yield path, cell
    elif depth < DEEPEST:
        for key, value in _inside(cell):
            yield from _values(value, path + key, depth + 1)


def _inside(cell: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(cell, dict):
        yield from ((f".{key}", value) for key, value in cell.items())
    elif isinstance(cell, list | tuple):
        yield from (("", value) for value in cell[:MOST_VALUES] if type(value) is not float)


def _from_json(text: str) -> Any:
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_free_text(values: list[str]) -> bool:
    phrases = [value for value in values if _is_phrase(value)]
    different = len(set(phrases))
    if not phrases or 2 * different < len(set(values)):
        return False
    if different > 1 and 2 * different >= len(phrases):
        return True
    return 2 * sum(map(_is_sentence, phrases)) >= len(phrases)


def _is_phrase(value: Any) -> bool:
    """Whether a value is a message, a sentence, or mostly words."""
    if isinstance(value, dict):
        return True
    return _words(value) >= SEVERAL or _is_sentence(value)


def _is_sentence(value: str) -> bool:
    ends = bool(_SENTENCE_END.search(value.rstrip()))
    return _words(value) >= (2 if ends else SENTENCE)


def _words(text: str) -> int:
    """The number of words of a text; 0 if most of it is something else, such as a date."""
    rest, letters = _WITHOUT_BLANKS.subn(" ", text)
    parts = rest.split()
    words = sum(bool(_LETTERS.search(part)) and "://" not in part for part in parts)
    found, others = words + letters // 2, len(parts) - words
    return found if found >= MANY or 2 * found >= 3 * others else 0
