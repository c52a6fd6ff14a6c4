"""Tables of a run as MLflow's pages draw them: single completions of evaluations, and answers."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

from .journal import MAX_TAG

TAG = "mlflow.loggedArtifacts"  # by which MLflow's pages know which files are tables
ANSWERS, EVALUATIONS = "answers.jsonl", "evaluations"
BESIDE = ("prompt", "before", "after")
TEXTS = {"row_id", "prompt_key", "role", "prompt", "completion"}


def table_of(path: Path) -> dict[str, Any] | None:
    """The columns and rows of a file that is drawn as a table; None of any other."""
    is_answers = path.name == ANSWERS
    if not (is_answers or (path.parent.name == EVALUATIONS and path.suffix == ".csv")):
        return None
    try:
        lines = _answers(path) if is_answers else _completions(path)
        columns = [*lines[0]] if lines else []
        return {"columns": columns, "data": [[line[name] for name in columns] for line in lines]}
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error):
        return None  # it was damaged, and is sent as it is


def _answers(path: Path) -> list[dict[str, Any]]:
    """The lines, the columns that are read beside one another first."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {name: line[name] for name in (*BESIDE, *sorted(line.keys() - {*BESIDE}))} for line in lines
    ]


def _completions(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as source:
        return [
            {name: text if name in TEXTS else _number(text) for name, text in line.items()}
            for line in csv.DictReader(source)
        ]


def _number(text: str) -> float | None:
    """The number, if JSON has it."""
    value = float(text)
    return value if math.isfinite(value) else None


def with_table(tag: str, file: str) -> str:
    """The tag that names the tables of a run, with one more; the oldest go where all do not fit."""
    entry = {"path": file, "type": "table"}
    named = [*(one for one in json.loads(tag or "[]") if one != entry), entry]
    while len(text := json.dumps(named)) > MAX_TAG:
        named = named[1:]
    return text
