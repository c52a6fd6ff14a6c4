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
from support.stage_one import Heard
from support.stub_reference import StubReference


def heard(config, *, share=None, shows_row=True):
    """What is said while a cache is made."""
    progress = Heard()
    how = {"progress": progress, "shows_row": shows_row}
    if share:
        precompute_part(config, StubReference(), share, **how)
    else:
        precompute(config, StubReference(), **how)
    assert sum(line.startswith("row ") for line in progress.lines) == bool(progress.row)
    return progress


def stored(config, number):
    """The row of the cache that is this one of the data."""
    rows = pq.read_table(Path(config.cache.output) / "data").to_pylist()
    (found,) = [row for row in rows if row["source"]["row"] == number]
    return found


def texts(line):
    """The quoted texts in a line."""
    return [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', line)]


def test_the_row_that_is_shown_is_one_that_is_scored(to):
    config = to(kl_pairs=2)
    first, prompt, *sides, mismatched = heard(config).row
    row = stored(config, int(re.match(r"row (\d+) of .*: *|.", first)[1]))
    backend = load_tokenizer(config.model.path, config.tokens).backend
    assert row["role"][:3] == [Role.CHOSEN, Role.REJECTED, Role.MISMATCHED]
    assert prompt.startswith(f"  prompt, {len(row['prompt_ids'])} tokens: ")
    told = dict(zip(("chosen", "rejected", "mismatched"), row["completion_ids"], strict=False))
    for line, (name, ids) in zip((*sides, mismatched), told.items(), strict=True):
        assert line.startswith(f"  {name}")
        assert f", {len(ids)} tokens: " in line
        assert "".join(texts(line)) == backend.decode(ids, skip_special_tokens=True)
    assert heard(replace(config, cache=replace(config.cache, output=f"{config.cache.output}2"))).row


def test_a_row_without_partners_is_shown_without(to):
    assert not any("mismatched" in line for line in heard(to(kl_pairs=0)).row)


def test_of_all_parts_the_first_shows_the_row_and_none_shows_one_for_nothing(config):
    second, first = (heard(config, share=Share(number, 2)).row for number in (2, 1))
    assert (second, bool(first)) == ([], True)
    assert heard(config).row == []  # it is complete
    assert heard(config, share=Share(1, 2)).row == []


def test_a_row_is_shown_only_where_it_is_asked_for(config):
    assert heard(config, shows_row=False).row == []


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_the_row_is_printed_on_any_terminal(config, encoding, tmp_path):
    rows = [
        {
            "prompt": f"Größe {number}?\x1b[2J",
            "chosen": f"né {number}",
            "rejected": f"日本 {number}",
        }
        for number in range(8)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = tmp_path / "said.txt"
    with path.open("wb") as file:
        own = replace(config, data=replace(config.data, files=[str(data)]))
        with TextIOWrapper(file, encoding=encoding) as stream:
            precompute(own, StubReference(), progress=make_progress(stream), shows_row=True)
    said = path.read_bytes().decode(encoding)
    assert r"\u001b[2J" in said
    assert "\x1b" not in said
    assert (r"Gr\xf6\xdfe" if encoding == "ascii" else "Größe") in said
