"""The flags that the page of data formats tells for public sets, on rows of their form."""

import re
import shlex

import pytest

from align.pipeline.precompute.check_data import check_data
from align.schemas.config import Config
from align.schemas.data_options import DataOptions
from align.schemas.rows import Role
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.input_files import iter_chunks
from support.pages import page
from support.public_sets import ASKED, BAD, GOOD, HI, NO, ROWS, YES
from support.read_rows import write_rows
from support.stage_one import Silent

_LINE = re.compile(r"^\| (?P<name>[\w.-]+/[\w.-]+)[^|]* \| (?P<told>[^|]*) \|$", re.MULTILINE)
TOLD = {
    found["name"]: found["told"]
    for found in _LINE.finditer(page("docs/data-formats.md").read_text(encoding="utf-8"))
}
FLAGS = [
    (name, words)
    for name, told in TOLD.items()
    for words in (re.findall(r"`(--map [^`]*)`", told) or [""])
]
PAIR = (Role.CHOSEN, Role.REJECTED)


def record_of(path, flags):
    maps = dict(word.split("=", 1) for word in shlex.split(flags) if word != "--map")
    config = Config(data=DataOptions(files=[path], map=maps))
    checked = check_data(config, progress=Silent())
    (chunk,) = iter_chunks(checked.inputs, checked.shape.columns)
    (record,), rejected = parse_chunk(chunk, checked.shape)
    assert not rejected
    return record


@pytest.mark.parametrize(("name", "flags"), FLAGS)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_set_is_read_with_the_flags_that_are_told(tmp_path, name, flags, ending):
    record = record_of(write_rows(tmp_path / f"rows.{ending}", [ROWS[name]]), flags)
    if isinstance(record.prompt, str):  # transcripts stay text
        assert ASKED in record.prompt
        answers = [text.strip() for text in record.completions]
        assert (answers, record.roles) == ([GOOD, BAD], PAIR)
    elif len(record.completions) == 1:
        assert (record.prompt, record.completions) == ((HI,), ((YES,),))
        assert record.roles == (Role.DESIRABLE,)
    else:
        assert record.prompt[-1] == HI
        assert (record.completions, record.roles) == (((YES,), (NO,)), PAIR)
    if "score" in flags:
        assert record.scores == (5.0, 2.0)


def test_every_set_that_is_told_has_a_row():
    assert TOLD.keys() == ROWS.keys()
    assert len(TOLD) >= 15
