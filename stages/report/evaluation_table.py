"""`evaluations/step-<n>.csv`: single held-out completions, a line each.

row counts the rows as the method reads them; row_id names the stored row; log_ratio is
log(policy / reference). A reward model has no log-probs: there is its score instead.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.errors import CorruptionError
from ..storage import fs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from ...schemas.evaluation import Judged

    Decode = Callable[[Iterable[int], bool], str]  # ids, and whether they continue a prompt

NAMES = ("row", "row_id", "role", "tokens")
OF_POLICY = ("logp", "reference_logp", "log_ratio")
SCORE = "policy_score"


@dataclass(frozen=True)
class Completion:
    """One completion, read back."""

    row: int
    role: str
    num_tokens: int
    value: float  # its log-ratio, or its score


@dataclass(frozen=True)
class Table:
    """All that a file holds of one evaluation."""

    what: str  # its values are
    unit: str
    completions: tuple[Completion, ...]  # with a value that is finite
    others: int


def evaluation_csv(judged: Sequence[Judged], *, scores: bool, decode: Decode | None) -> str:
    """All of it as text; with `decode` also that of prompts and completions."""
    texts = ("prompt", "completion") if decode else ()
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow([*NAMES, *((SCORE,) if scores else OF_POLICY), *texts])
    for one in judged:
        ratio = one.logp - one.reference_logp
        numbers = (one.logp,) if scores else (one.logp, one.reference_logp, ratio)
        cells = [one.row, one.row_id, one.role.name.lower(), one.num_tokens, *map(repr, numbers)]
        writer.writerow([*cells, *(_texts(one, decode) if decode else ())])
    return sink.getvalue()


def read_evaluation(path: Path) -> Table:
    """The numbers of a file that `evaluation_csv` wrote."""
    lines = csv.DictReader(io.StringIO(fs.read_bytes(path).decode()))
    value = SCORE if SCORE in (lines.fieldnames or ()) else OF_POLICY[-1]
    try:
        completions = [_completion(line, value) for line in lines]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{path} is damaged ({error!r}). Remove it: nothing but the report reads it."
        ) from error
    finite = tuple(one for one in completions if math.isfinite(one.value))
    named = ("Score", "score") if value == SCORE else ("Log-ratio", "nats")
    return Table(*named, finite, len(completions) - len(finite))


def _completion(line: Mapping[str, str], value: str) -> Completion:
    return Completion(int(line["row"]), line["role"], int(line["tokens"]), float(line[value]))


def _texts(one: Judged, decode: Decode) -> tuple[str, str]:
    assert one.prompt is not None, "the evaluation was told to keep ids"
    assert one.completion is not None, "the evaluation was told to keep ids"
    return decode(one.prompt, False), decode(one.completion, True)
