"""`align inspect --row` and `--rejected`: what became of a single row of the data."""

import json
import re
from pathlib import Path

import pytest

from align.pipeline.precompute.inspect_rows import lines_of_inspection
from align.stages.storage.cache import Cache
from support.command import align
from support.stage_one import run


@pytest.fixture
def made(flawed):
    """A cache of the data with one row that cannot be used."""
    run(flawed)
    return Cache(Path(flawed.cache.output))


def shown(folder, row=None, **more):
    options = {"rejected": False, "as_json": False, "model": None} | more
    return [*map(str, lines_of_inspection(folder, row=row, **options))]


def test_a_row_is_found_by_its_place_or_id_and_a_dropped_one_says_why(made, flawed_file):
    lines = flawed_file.read_text().splitlines()
    for number in (0, 17, len(lines) - 2):
        row = json.loads(lines[number])
        by_place = shown(made, f"flawed.jsonl:{number}")
        assert shown(made, str(number)) == by_place
        text = "\n".join(by_place)
        assert json.dumps(row["chosen"][:20], ensure_ascii=False)[1:-1] in text
        (name,) = re.findall(r"row id ([0-9a-f]{32})", text)
        assert shown(made, name) == shown(made, name[:8]) == by_place
        sums = dict(re.findall(r"(\w+): (-[0-9.]+) of", text))
        assert {"chosen", "rejected", "mismatched"} == set(sums)
    last = len(lines) - 1
    (dropped,) = shown(made, f"{last}")
    assert dropped.startswith(f"flawed.jsonl row {last}: empty_completion: 'chosen'")
    assert shown(made, rejected=True)[1:] == [dropped]


def test_the_rejected_rows_are_counted(made):
    assert "1 of 121 rows" in align("inspect", made.root, "--rejected").out
