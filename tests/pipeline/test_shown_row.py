"""Stage 1 shows one row before it scores, to who runs it and to nobody else."""

import json
import re
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from align.pipeline.executor import Share
from align.pipeline.precompute import precompute, precompute_part
from align.schemas.rows import Role
from align.stages.data.tokenizer import load_tokenizer
from align.stages.tracking.progress import make_progress
from support.read_rows import write_rows
from support.stage_one import Heard
from support.stub_reference import StubReference


def row_shown(config, *, share=None, shows_row=True):
    """The lines of the row that is shown while a cache is made."""
    progress = Heard()
    how = {"progress": progress, "shows_row": shows_row}
    if share:
        precompute_part(config, StubReference(), share, **how)
    else:
        precompute(config, StubReference(), **how)
    assert sum(line.startswith("row ") for line in progress.lines) == bool(progress.row)
    return progress.row


def texts(line):
    """The quoted texts in a line."""
    return [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', line)]


def test_the_row_that_is_shown_is_one_that_is_scored(to):
    config = to(kl_pairs=2)
    first, prompt, *lines = row_shown(config)
    number = int(re.match(r"row (\d+) of .*: *|.", first)[1])
    stored = pq.read_table(Path(config.cache.output) / "data").to_pylist()
    (row,) = [one for one in stored if one["source"]["row"] == number]
    backend = load_tokenizer(config.model.path, config.tokens).backend
    assert row["role"][:3] == [Role.CHOSEN, Role.REJECTED, Role.MISMATCHED]
    assert prompt.startswith(f"  prompt, {len(row['prompt_ids'])} tokens: ")
    for line, name, ids in zip(
        lines, ("chosen", "rejected", "mismatched"), row["completion_ids"][:3], strict=True
    ):
        assert line.startswith(f"  {name}")
        assert f", {len(ids)} tokens: " in line
        assert "".join(texts(line)) == backend.decode(ids, skip_special_tokens=True)
    without = row_shown(to(kl_pairs=0, output=f"{config.cache.output}-without"))
    assert len(without) == 4  # its place, the prompt and two sides


def test_of_all_parts_the_first_shows_a_row_where_it_is_asked_for_and_none_shows_one_for_nothing(
    config,
):
    second, first = (row_shown(config, share=Share(number, 2)) for number in (2, 1))
    assert (second, bool(first)) == ([], True)
    assert row_shown(config) == []  # it is complete
    assert row_shown(config, share=Share(1, 2)) == []
    other = replace(config, cache=replace(config.cache, output=f"{config.cache.output}-other"))
    assert row_shown(other, shows_row=False) == []


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_the_row_is_printed_on_any_terminal(config, encoding, tmp_path):
    cells = {"prompt": "Größe {}?\x1b[2J", "chosen": "né {}", "rejected": "日本 {}"}
    rows = [{name: cell.format(n) for name, cell in cells.items()} for n in range(8)]
    data, path = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "said.txt"
    with path.open("wb") as file, TextIOWrapper(file, encoding=encoding) as stream:
        own = replace(config, data=replace(config.data, files=[data]))
        precompute(own, StubReference(), progress=make_progress(stream), shows_row=True)
    said = path.read_bytes().decode(encoding)
    assert r"\u001b[2J" in said
    assert "\x1b" not in said
    assert (r"Gr\xf6\xdfe" if encoding == "ascii" else "Größe") in said
