"""Earlier caches that are damaged, gone or of another release: passed over, and named."""

import json
import logging
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from align.pipeline.cache_compatibility import candidates, register_cache
from align.schemas.json_codec import to_json
from align.stages.storage.cache_folder import CacheFolder
from support.stage_one import run


def shards_of(folder):
    return sorted((Path(folder) / "data").iterdir())


def corrupt(shard):
    shard.write_bytes(shard.read_bytes()[:-9] + b"not these")


@pytest.fixture
def warnings(caplog):
    """The lines `align` warned with."""
    caplog.set_level(logging.WARNING, logger="align")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "align"]


@pytest.mark.parametrize(
    ("damage", "seed", "token_logps"), [(Path.unlink, 0, True), (corrupt, 5, False)]
)
def test_a_damaged_shard_is_scored_anew(to, tmp_path, warnings, damage, seed, token_logps):
    run(to(seed=seed, token_logps=token_logps))
    shard = shards_of(to().cache.output)[0]
    damage(shard)
    reused = to(output=str(tmp_path / "b"), reuse=[to().cache.output], token_logps=token_logps)
    outcome = run(reused)
    assert outcome.tally.scored
    assert outcome.tally.reused
    assert [shard.name in line for line in warnings()] == [True]
    run(to(output=str(tmp_path / "c"), token_logps=token_logps))
    assert scores(tmp_path / "b") == scores(tmp_path / "c")


def scores(folder):
    """What a cache says of each row."""
    return {
        row["row_id"]: (row["completion_ids"], row["ref_logp"], row.get("ref_token_logps"))
        for shard in shards_of(folder)
        for row in pq.read_table(shard).to_pylist()
    }


def aged(manifest):
    manifest.write_text(to_json(json.loads(manifest.read_text()) | {"format_version": 1}))


DAMAGE = {
    "garbled": lambda manifest: manifest.write_text("{}"),
    "newer": lambda manifest: manifest.write_text('{"format_version":99}'),
    "old": aged,
    "old too": aged,
}


@pytest.mark.parametrize("is_named", [True, False])
def test_caches_that_cannot_be_read_are_passed_over_and_named(to, tmp_path, warnings, is_named):
    outputs = [str(tmp_path / name) for name in DAMAGE]
    for seed, output in enumerate(outputs):
        run(to(output=output, seed=seed))
        register_cache(CacheFolder(Path(output)))
        DAMAGE[Path(output).name](Path(output) / "manifest.json")
    again = to(reuse=outputs if is_named else [], reuse_known=not is_named)
    reused = run(again).tally.reused
    # Branches that are copied from their like in the same shard are no reuse of another cache.
    assert reused == run(to(output=str(tmp_path / "alone"))).tally.reused
    *others, old = sorted(warnings(), key=lambda line: "2 earlier caches" in line)
    assert all(output in old for output in outputs[2:])
    assert sorted(output for output in outputs for line in others if output in line) == sorted(
        outputs[:2]
    )


def test_a_list_of_caches_may_hold_anything_and_need_not_be_writable(
    to, tmp_path, monkeypatch, warnings
):
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    run(to())
    folder = CacheFolder(Path(to().cache.output))
    (tmp_path / "caches.txt").write_bytes(b"\xff\xfe\n\n/none\n" + b"x" * 5000 + b"\n")
    register_cache(folder)
    other = CacheFolder(tmp_path / "other")
    offered = candidates(to(reuse_known=True).cache, other)
    assert offered == (str(other.root), str(folder.root.resolve()))
    assert warnings() == []
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "caches.txt" / "home"))
    assert run(to(output=str(other.root))).manifest.rows == 120
    assert [str(other.root) in line for line in warnings()] == [True]
