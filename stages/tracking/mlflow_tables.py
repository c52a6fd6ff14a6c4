"""Tables of a run as MLflow's pages draw them: completions of evaluations, and answers."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

TAG = "mlflow.loggedArtifacts"  # by which MLflow's pages know which files are tables
MAX_TAG = 5000  # what the oldest SQL schema still holds
ANSWERS, EVALUATIONS = "answers.jsonl", "evaluations"
BESIDE = ("prompt", "before", "after")  # columns that are read beside one another
TEXTS = {"row_id", "prompt_key", "role", "prompt", "completion"}


def table_of(path: Path) -> dict[str, Any] | None:
    """The columns and rows of a file that is drawn as a table; None of any other."""
    if path.name == ANSWERS:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        columns = [*BESIDE, *sorted({*rows[0]} - {*BESIDE})] if rows else []
    elif path.parent.name == EVALUATIONS and path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as source:
            rows = [*csv.DictReader(source)]
        columns = [*rows[0]] if rows else []
        for row in rows:
            row.update({name: _number(row[name]) for name in columns if name not in TEXTS})
    else:
        return None
    return {"columns": columns, "data": [[row[name] for name in columns] for row in rows]}


def _number(text: str) -> float | None:
    """The number, if JSON has it."""
    value = float(text)
    return value if math.isfinite(value) else None


def with_table(tag: str, file: str) -> str:
    """The tag that names the tables of a run, with one more; the oldest go where all do not fit."""
    entry = {"path": file, "type": "table"}
    tables = [*(one for one in json.loads(tag or "[]") if one != entry), entry]
    while len(text := json.dumps(tables)) > MAX_TAG:
        tables = tables[1:]
    return text
