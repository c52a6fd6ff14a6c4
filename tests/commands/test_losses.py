"""Rows lost while scoring: each is named, and too many of them stop the run."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from align.pipeline.precompute.verify import verify, verify_files
from align.schemas.config import ModelOptions
from align.schemas.errors import BadDataError, CorruptionError, NonFiniteError
from align.stages.storage.cache import Cache
from support.faulty_scorer import Faulty
from support.refusals import refuses
from support.stage_one import contents, run
from support.stub_reference import StubReference


@dataclass(frozen=True)
class Lossy:
    """The stub: some tokens have no finite log-prob, and long completions do not fit."""

    tokens: tuple = ()
    room: int = 10**9

    def identity(self):
        return StubReference().identity()

    def hidden_size(self):
        return 64

    def open(self):
        poison = dict.fromkeys(self.tokens, np.nan)
        return Faulty(poison=poison, room=self.room, pads=False)


@pytest.fixture
def token(to, tmp_path):
    """One that few completions hold."""
    run(to(output=str(tmp_path / "clean")))
    completions = [ids for row in rows_of(tmp_path / "clean") for ids in row["completion_ids"]]
    counts = Counter(token for ids in completions for token in {*ids})
    return min((count, token) for token, count in counts.items() if count > 9)[1]


def rows_of(folder):
    return read(sorted(Path(folder, "data").iterdir()))


def allowing(config, fraction):
    return replace(config, data=replace(config.data, max_bad_frac=fraction))


def read(paths):
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_every_row_is_in_one_shard_or_rejected(flawed, token):
    config = allowing(flawed, 0.9)
    manifest = run(config, Lossy((token,), room=150)).manifest
    root = Path(config.cache.output)
    stored = [row["source"] for row in read(root / "data" / part.file for part in manifest.shards)]
    rejected = read([root / manifest.rejected.file])
    kept = [(source["file"], source["row"]) for source in stored]
    lost = [(row["file"], row["row"]) for row in rejected]
    (data,) = manifest.inputs
    assert sorted(kept + lost) == [(data.sha256[:16], row) for row in range(manifest.rows_in)]
    assert manifest.reasons == Counter(row["reason"] for row in rejected)
    assert {"empty_completion", "nonfinite_logp", "oom"} == set(manifest.reasons)
    assert all(row["detail"] for row in rejected)
    assert {row["file_name"] for row in rejected} == {"flawed.jsonl"}
    assert verify_files(Cache(root)) == manifest
    assert manifest.rejected.file in contents(config.cache.output)


def test_more_losses_than_allowed_publish_nothing_until_they_are_allowed(config, token):
    folder, reference = Cache(Path(config.cache.output)), Lossy((token,), room=150)
    reasons = ("oom", "nonfinite_logp")
    with refuses(BadDataError, "of 120", *reasons, "--max-bad-frac", folder.rejected):
        run(config, reference)
    assert not folder.manifest_file.exists()
    outcome = run(allowing(config, 0.9), reference)
    assert outcome.counts.shards == 0  # what was scored is kept
    assert folder.manifest_file.exists()


def test_a_cache_with_too_many_losses_or_without_rows_is_never_published(config, token, tmp_path):
    end = rows_of(tmp_path / "clean")[0]["completion_ids"][0][-1]  # as of all completions
    for reference, allowed, error in (
        # A reference that gives NaN is not reported as bad data.
        (Lossy((token,)), 0.001, NonFiniteError),
        (Lossy((end,)), 1.0, NonFiniteError),
        (Lossy(room=1), 1.0, BadDataError),
    ):
        output = f"{config.cache.output}-{allowed}-{reference.room}"
        own = replace(config, cache=replace(config.cache, output=output))
        with pytest.raises(error):
            run(allowing(own, allowed), reference)
        assert not Cache(Path(output)).manifest_file.exists()


def test_a_verified_cache_holds_what_its_reference_gives(to, token):
    run(to(), Lossy())
    opened = []

    def verified(reference):
        opened.clear()
        options = ModelOptions(path="other", device="cpu")
        return verify(
            Path(to().cache.output),
            options,
            model=None,
            rescore=200,
            open_reference=lambda given: opened.append(given) or reference,
        )

    assert "0.00e+00" in verified(Lossy())
    assert opened[0].device == "cpu"  # which the cache does not record
    assert opened[0].path == str(Path(to().model.path).resolve())  # the cache's, unless asked
    with refuses(CorruptionError, "nan"):
        verified(Lossy((token,)))
