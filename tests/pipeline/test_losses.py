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


def read(paths):
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_every_row_is_in_one_shard_or_in_quarantine(flawed):
    config = allowing(flawed, 0.9)
    manifest = run(config, Lossy(every=7, room=150)).manifest
    root = Path(config.cache.output)
    stored = [row["source"] for row in read(root / "data" / part.file for part in manifest.shards)]
    rejected = read(root / entry.file for entry in manifest.quarantine)
    kept = [(source["file"], source["row"]) for source in stored]
    lost = [(row["file"], row["row"]) for row in rejected]
    (data,) = manifest.inputs
    assert sorted(kept + lost) == [(data.sha256[:16], row) for row in range(manifest.rows_in)]
    assert manifest.quarantined == Counter(row["reason"] for row in rejected)
    assert {"empty_completion", "nonfinite_logp", "oom"} == set(manifest.quarantined)
    assert all(row["detail"] for row in rejected)
    assert {row["file_name"] for row in rejected} == {"flawed.jsonl"}
    assert verify_cache(CacheFolder(root)) == manifest
    named = {entry.file for entry in manifest.quarantine}
    assert {name for name in contents(config.cache.output) if name.startswith("qu")} == named


def test_more_losses_than_allowed_publish_nothing_until_they_are_allowed(config):
    folder, reference = CacheFolder(Path(config.cache.output)), Lossy(every=7, room=150)
    with pytest.raises(BadDataError, match=r"of 120 rows cannot be used \(\d+ ") as refusal:
        run(config, reference)
    for said in ("oom", "nonfinite_logp", "--max-bad-frac", f"{folder.quarantine}{os.sep}part-"):
        assert said in str(refusal.value)
    assert not folder.manifest.exists()
    outcome = run(allowing(config, 0.9), reference)
    assert outcome.tally.units == 0  # what was scored is kept
    assert folder.manifest.exists()


@pytest.mark.parametrize(
    ("reference", "allowed", "error", "said"),
    [
        # A reference that gives NaN is not reported as bad data.
        (Lossy(every=7), 0.001, NonFiniteError, "--dtype float32, and check the weights"),
        (Lossy(every=1), 1.0, NonFiniteError, "0 rows would be left"),
        (Lossy(room=1), 1.0, BadDataError, "0 rows would be left"),
    ],
)
def test_a_cache_with_too_many_losses_or_without_rows_is_never_published(
    config, reference, allowed, error, said
):
    with pytest.raises(error, match=said):
        run(allowing(config, allowed), reference)
    assert not CacheFolder(Path(config.cache.output)).manifest.exists()
