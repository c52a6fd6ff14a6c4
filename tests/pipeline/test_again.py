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
    heals: bool = True

    def identity(self):
        return StubReference().identity()

    def hidden_size(self):
        return 64

    def open(self):
        return Faulty(poison={self.token: np.nan}, heals=self.heals, pads=False)


def rows_of(folder):
    paths = sorted(Path(folder, "data").iterdir())
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def verified(cache, reference, options=None):
    return verify(
        Path(cache), options or ModelOptions(), model=None, rescore=200, open_reference=reference
    )


def test_a_cache_holds_the_scores_of_the_second_try_and_says_how_many(to, tmp_path):
    run(to(output=str(tmp_path / "clean")))
    clean = rows_of(tmp_path / "clean")
    shaky = Shaky(clean[0]["completion_ids"][0][1])
    manifest = run(to(), shaky).manifest
    cache = to().cache.output
    assert rows_of(cache) == clean
    poisoned = {
        (tuple(row["prompt_ids"]), tuple(ids))
        for row in clean
        for ids in row["completion_ids"]
        if shaky.token in ids
    }
    assert manifest.notes[NOTE] == len(poisoned)
    assert manifest.notes[NOTE] == sum(shard.notes.get(NOTE, 0) for shard in manifest.shards)
    assert manifest.quarantined == {}
    assert NOTE.replace("_", " ") in render(summarize(CacheFolder(Path(cache))))
    run(to(output=str(tmp_path / "again")), shaky)
    assert contents(tmp_path / "again") == contents(cache)
    said = verified(cache, lambda _: shaky)  # which tries twice as well
    assert f"{manifest.branches} branches scored again: largest difference 0.00e+00" in said
    with pytest.raises(CorruptionError, match="scores nan now"):
        verified(cache, lambda _: Shaky(shaky.token, heals=False))


def test_verify_opens_the_reference_with_what_the_cache_does_not_record(to):
    run(to())
    opened = []
    options = ModelOptions(path="other", device_map="auto", trust_remote_code=True)
    verified(to().cache.output, lambda given: opened.append(given) or StubReference(), options)
    for given in opened:
        assert (given.device_map, given.trust_remote_code) == ("auto", True)
        assert given.path == str(Path(to().model.path).resolve())  # the cache's, unless asked
    assert opened
