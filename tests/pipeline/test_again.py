"""Completions without a finite log-prob get one more chance, and every one of them is counted."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from align.pipeline.verify import verify
from align.schemas.config import ModelOptions
from align.schemas.errors import CorruptionError
from align.stages.report.cache_summary import summarize
from align.stages.report.cache_tables import render
from align.stages.storage.cache_folder import CacheFolder
from support.faulty_scorer import Faulty
from support.stage_one import contents, run
from support.stub_reference import StubReference

NOTE = "completions_scored_again_alone_in_float32"


@dataclass(frozen=True)
class Shaky:
    """The stub, but for one token, which has no log-prob unless the scorer is in float32."""

    token: int

    def identity(self):
        return StubReference().identity()

    def hidden_size(self):
        return 64

    def open(self):
        return Faulty(poison={self.token: np.nan}, heals=True, pads=False)


def rows_of(folder):
    return [row for path in sorted(Path(folder, "data").iterdir()) for row in read(path)]


def read(path):
    return pq.read_table(path).to_pylist()


@pytest.fixture
def clean_rows(to, tmp_path):
    """The rows of a cache whose scores were all finite at once."""
    run(to(output=str(tmp_path / "clean")))
    return rows_of(tmp_path / "clean")


@pytest.fixture
def shaky(clean_rows):
    """Knows every score but those of completions with the second token of the first."""
    return Shaky(clean_rows[0]["completion_ids"][0][1])


def test_a_cache_holds_the_scores_of_the_second_try_and_says_how_many(to, clean_rows, shaky):
    manifest = run(to(), shaky).manifest
    assert rows_of(to().cache.output) == clean_rows
    distinct = {
        (tuple(row["prompt_ids"]), tuple(ids))
        for row in clean_rows
        for ids in row["completion_ids"]
        if shaky.token in ids
    }
    assert (
        manifest.notes[NOTE] == len(distinct) == sum(s.notes.get(NOTE, 0) for s in manifest.shards)
    )
    assert manifest.quarantined == {}
    shown = render(summarize(CacheFolder(Path(to().cache.output))))
    assert NOTE.replace("_", " ") in shown


def test_the_second_try_gives_the_same_bytes_every_time(to, shaky, tmp_path):
    run(to(), shaky)
    run(to(output=str(tmp_path / "again")), shaky)
    assert contents(tmp_path / "again") == contents(to().cache.output)


def verified(cache, reference, options=None):
    return verify(
        Path(cache), options or ModelOptions(), model=None, rescore=200, open_reference=reference
    )


def test_verify_tries_twice_as_well(to, shaky):
    branches = run(to(), shaky).manifest.branches
    said = verified(to().cache.output, lambda _: shaky)
    assert f"{branches} branches scored again: largest difference 0.00e+00" in said


def test_a_score_that_is_no_number_any_more_is_not_verified(to, shaky):
    @dataclass(frozen=True)
    class Broken(Shaky):
        def open(self):
            return Faulty(poison={self.token: np.nan}, pads=False)

    run(to(), shaky)
    with pytest.raises(CorruptionError, match="and scores nan now"):
        verified(to().cache.output, lambda _: Broken(shaky.token))


def test_verify_opens_the_reference_with_what_the_cache_does_not_record(to):
    run(to())
    opened = []
    options = ModelOptions(path="other", device_map="auto", trust_remote_code=True)
    verified(to().cache.output, lambda given: opened.append(given) or StubReference(), options)
    for given in opened:
        assert (given.device_map, given.trust_remote_code) == ("auto", True)
        assert given.path == str(Path(to().model.path).resolve())  # the cache's, unless asked
    assert opened
