"""`answers.jsonl`: held-out prompts, each answered before training and after, a line each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...schemas.errors import CorruptionError
from ...schemas.json_codec import CodecError, from_json, to_json
from ..storage.disk.lines import read_lines


@dataclass(frozen=True)
class Answered:
    """A prompt with the likeliest answer of the policy as it began, and as it was trained."""

    row_id: str  # of the held-out row
    prompt: str
    before: str
    after: str
    before_ended: bool  # False: it was cut after the most new tokens
    after_ended: bool


def answers_jsonl(answers: Iterable[Answered]) -> bytes:
    """The file, a line each."""
    return b"".join(to_json(one).encode() for one in answers)


def read_answers(path: Path) -> tuple[Answered, ...]:
    """The lines of a file that `answers_jsonl` wrote."""
    try:
        return tuple(from_json(Answered, line.text) for line in read_lines(path))
    except CodecError as error:
        raise CorruptionError(
            f"{path} is damaged ({error}). Remove it: the report does without."
        ) from error
