"""What stage 1 says of its rows: what it does not read, and one row as the model reads it."""

import json
import re
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from align.pipeline.parts import Part
from align.pipeline.precompute.precompute import precompute
from align.schemas.data_options import DataOptions
from align.schemas.errors import BadDataError
from align.stages.data.tokenizer import load_tokenizer
from align.stages.tracking.progress import Progress
from support.read_rows import write_rows
from support.refusals import refuses
from support.stage_one import Heard, run
from support.stub_reference import StubReference


@pytest.fixture
def config_over(config, tmp_path):
    """The config over rows, in a JSON file of their own."""

    def write(*rows, **columns):
        path = write_rows(tmp_path / "rows.jsonl", rows)
        return replace(config, data=DataOptions(files=[path], map=columns))

    return write


def pair(number, **more):
    return {"prompt": f"Why {number}?", "chosen": " so", "rejected": " no", **more}


def test_unread_columns_are_named_and_no_part_of_the_cache(config_over):
    rows = [pair(n, id=f"a{n}", note=f"Some words of an annotator, {n}.") for n in range(300)]
    rows.append(pair(0, chosen=" no", rejected=" so"))
    config, heard = config_over(*rows), Heard()
    made = precompute(config, StubReference(), progress=heard)
    assert "'id', 'note'" in heard.lines[1]
    assert "note: 1 pair in both orders" in made.text().splitlines()
    left_out = run(config_over(*rows, id="", note=""))
    assert left_out.manifest.root == made.manifest.root


def compared(number, strength):
    return {
        "prompt": f"Why {number}?",
        "response_1": "So.",
        "response_2": "No.",
        "preference_strength": strength,
    }


def test_ties_are_counted_apart_and_any_number_of_them_may_be_there(config_over):
    rows = [compared(n, n % 2) for n in range(40)]
    made = run(config_over(*rows))
    assert made.manifest.reasons == {"tie": 20}
    assert (made.manifest.rows, "20 of 40" in made.text()) == (20, True)
    assert "dropped" not in made.text()
    faulty = config_over(*rows, compared(40, "much"))
    with refuses(BadDataError, "1 of 41", "1 schema", "jsonl row 40: schema"):
        run(replace(faulty, cache=replace(faulty.cache, output=f"{faulty.cache.output}-2")))
    ties = config_over(*(compared(n, 0) for n in range(4)))
    with refuses(BadDataError, "0 of 4", "4 ties"):
        run(replace(ties, cache=replace(ties.cache, output=f"{ties.cache.output}-3")))


def row_shown(config, *, part=None):
    """The lines of the row that is shown while a cache is made."""
    progress = Heard()
    how = {"progress": progress, "shows_row": True}
    if part:
        precompute(config, StubReference(), part=part, **how)
    else:
        precompute(config, StubReference(), **how)
    return progress.row


def texts(line):
    """The quoted texts in a line."""
    return [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', line)]


def test_the_row_that_is_shown_once_is_one_that_is_scored(to):
    config = to(kl_pairs=2)
    first, prompt, *lines = row_shown(config)
    number = int(re.match(r"row (\d+) of .*: *|.", first)[1])
    stored = pq.read_table(Path(config.cache.output) / "data").to_pylist()
    (row,) = [one for one in stored if one["source"]["row"] == number]
    backend = load_tokenizer(config.model.path, config.tokens).backend
    assert prompt.startswith(f"  prompt, {len(row['prompt_ids'])} tokens: ")
    for line, ids in zip(lines, row["completion_ids"][:3], strict=True):
        assert f", {len(ids)} tokens: " in line
        assert "".join(texts(line)) == backend.decode(ids, skip_special_tokens=True)
    assert row_shown(config) == []  # it is complete
    parts = to(kl_pairs=0, output=f"{config.cache.output}-without")
    second, first = (row_shown(parts, part=Part(number, 2)) for number in (2, 1))
    assert (second, len(first)) == ([], 4)  # its place, the prompt and two sides


def test_the_row_is_printed_on_any_terminal(config, tmp_path):
    cells = {"prompt": "Größe {}?\x1b[2J", "chosen": "né {}", "rejected": "日本 {}"}
    rows = [{name: cell.format(n) for name, cell in cells.items()} for n in range(8)]
    data, path = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "said.txt"
    with path.open("wb") as file, TextIOWrapper(file, encoding="ascii") as stream:
        own = replace(config, data=replace(config.data, files=[data]))
        precompute(own, StubReference(), progress=Progress(stream), shows_row=True)
    said = path.read_bytes().decode("ascii")
    assert r"Gr\xf6\xdfe" in said
    assert "\x1b" not in said
