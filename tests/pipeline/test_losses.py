"""Rows lost while scoring: each is named, and too many of them stop the run."""

import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import BadDataError, NonFiniteError
from align.schemas.rows import OutOfMemory
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.verify_cache import verify_cache
from support.stage_one import contents, run
from support.stub_reference import StubReference


@dataclass(frozen=True)
class Lossy:
    """The stub: some completions have no finite log-prob, and long ones do not fit."""

    every: int = 0  # NaN where the sum of a completion's ids is a multiple of this
    room: int = 10**9
    pads: bool = False

    def identity(self):
        return {"model": f"lossy {self.every} {self.room}", "dtype": "float32"}

    def hidden_size(self):
        return 64

    def open(self):
        return self

    def describe(self):
        return {"path": "lossy"}

    def in_float32(self):
        return nullcontext()

    def score(self, trees):
        if sum(tree.num_tokens for tree in trees) > self.room:
            raise OutOfMemory("no room")
        values = StubReference().open().score(trees)
        branches = [branch for tree in trees for branch in tree.branches]
        bad = [bool(self.every) and int(ids.sum()) % self.every == 0 for ids in branches]
        values[np.repeat(bad, list(map(len, branches)))] = np.nan
        return values


def allowing(config, fraction):
    return replace(config, data=replace(config.data, max_bad_frac=fraction))


def places(folder, manifest):
    """Where the rows of a cache stood that were stored, and those that were rejected."""
    root = Path(folder)
    stored = [row for shard in manifest.shards for row in read(root / "data" / shard.file)]
    rejected = [row for entry in manifest.quarantine for row in read(root / entry.file)]
    return [(row["source"]["file"], row["source"]["row"]) for row in stored], rejected


def read(path):
    return pq.read_table(path).to_pylist()


def test_every_row_is_in_one_shard_or_in_quarantine(flawed):
    config = allowing(flawed, 0.9)
    manifest = run(config, Lossy(every=7, room=150)).manifest
    stored, rejected = places(config.cache.output, manifest)
    lost = [(row["file"], row["row"]) for row in rejected]
    (data,) = manifest.inputs
    assert sorted(stored + lost) == [(data.sha256[:16], row) for row in range(manifest.rows_in)]
    assert manifest.quarantined == Counter(row["reason"] for row in rejected)
    assert {"empty_completion", "nonfinite_logp", "oom"} == set(manifest.quarantined)
    assert all(row["detail"] for row in rejected)
    assert {row["file_name"] for row in rejected} == {"flawed.jsonl"}
    assert verify_cache(CacheFolder(Path(config.cache.output))) == manifest
    kept = {entry.file for entry in manifest.quarantine}
    assert {name for name in contents(config.cache.output) if name.startswith("qu")} == kept


def test_more_losses_than_allowed_publish_nothing_until_they_are_allowed(config):
    folder, reference = CacheFolder(Path(config.cache.output)), Lossy(every=7, room=150)
    with pytest.raises(BadDataError, match=r"of 120 rows cannot be used \(\d+ ") as refusal:
        run(config, reference)
    said = str(refusal.value)
    assert "oom" in said
    assert "nonfinite_logp" in said
    assert "--max-bad-frac allows 0.001" in said
    assert f"{folder.quarantine}{os.sep}part-" in said
    assert not folder.manifest.exists()
    outcome = run(allowing(config, 0.9), reference)
    assert outcome.tally.units == 0  # what was scored is kept
    assert folder.manifest.exists()


def test_a_reference_that_gives_nan_is_not_reported_as_bad_data(config):
    with pytest.raises(NonFiniteError, match="--dtype float32, and check the weights"):
        run(config, Lossy(every=7))
    assert not CacheFolder(Path(config.cache.output)).manifest.exists()


@pytest.mark.parametrize(
    ("reference", "error"), [(Lossy(every=1), NonFiniteError), (Lossy(room=1), BadDataError)]
)
def test_a_cache_without_rows_is_never_published(config, reference, error):
    with pytest.raises(error, match="0 rows would be left"):
        run(allowing(config, 1.0), reference)
    assert not CacheFolder(Path(config.cache.output)).manifest.exists()
