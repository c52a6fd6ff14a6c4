"""Earlier caches that are damaged or gone, and what may not be lost when a cache grows."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from align.pipeline import cache_compatibility
from align.pipeline.cache_compatibility import candidates, register_cache, require_same_or_growing
from align.schemas.config import DataOptions
from align.schemas.errors import FingerprintError
from align.schemas.json_codec import to_json
from align.stages.score import reuse
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest
from support.patience import PATIENCE
from support.stage_one import child, contents, run


def shards_of(folder):
    return sorted((Path(folder) / "data").iterdir())


def remove(folder):
    shards_of(folder)[0].unlink()


def corrupt(folder):
    shard = shards_of(folder)[0]
    shard.write_bytes(shard.read_bytes()[:-9] + b"not these")


def garble(folder):
    (Path(folder) / "manifest.json").write_text("{}")


def outdate(folder):
    """Gives a cache a format that only a later version can read."""
    (Path(folder) / "manifest.json").write_text('{"format_version":99}')


@pytest.fixture
def warnings(caplog):
    """The lines `align` warned with."""
    caplog.set_level(logging.WARNING, logger="align")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "align"]


@pytest.mark.parametrize("damage", [remove, corrupt])
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("token_logps", [True, False])
def test_a_damaged_shard_is_scored_anew(to, tmp_path, warnings, damage, seed, token_logps):
    run(to(seed=seed, token_logps=token_logps))
    shard = shards_of(to().cache.output)[0]
    damage(to().cache.output)
    reused = to(output=str(tmp_path / "b"), reuse=[to().cache.output], token_logps=token_logps)
    outcome = run(reused)
    assert outcome.tally.scored
    assert outcome.tally.reused
    assert [shard.name in line for line in warnings()] == [True]
    run(to(output=str(tmp_path / "c"), token_logps=token_logps))
    assert scores(tmp_path / "b") == scores(tmp_path / "c")


@pytest.mark.parametrize("harm", [garble, outdate])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_cache_with_an_unreadable_manifest_is_passed_over(to, tmp_path, warnings, harm, is_named):
    run(to())
    harm(to().cache.output)
    reuse = [to().cache.output] if is_named else []
    again = to(output=str(tmp_path / "b"), reuse=reuse, reuse_known=not is_named)
    assert run(again).tally.reused == reused_alone(to, tmp_path)
    assert [to().cache.output in line for line in warnings()] == [True]


@pytest.mark.parametrize("is_named", [True, False])
def test_caches_of_an_older_align_are_passed_over_counted_and_named(
    to, tmp_path, warnings, is_named
):
    made = [to(output=str(tmp_path / name), seed=seed) for seed, name in enumerate("ab")]
    for config in made:
        run(config)
        register_cache(CacheFolder(Path(config.cache.output)))
        age(Path(config.cache.output) / "manifest.json")
    reuse = [config.cache.output for config in made] if is_named else []
    again = to(output=str(tmp_path / "c"), reuse=reuse, reuse_known=not is_named)
    assert run(again).tally.reused == reused_alone(to, tmp_path)
    (line,) = warnings()
    assert line.startswith("2 earlier caches were made by an older align and are not reused: ")
    assert all(config.cache.output in line for config in made)


def reused_alone(to, tmp_path):
    """Branches that are copied from their like in the same shard."""
    return run(to(output=str(tmp_path / "alone"))).tally.reused


def age(path):
    """Gives a manifest or plan the format of an older align."""
    path.write_text(to_json(json.loads(path.read_text()) | {"format_version": 1}))


def test_work_that_an_older_align_began_is_refused_and_left_alone(to):
    child(to(), "commit.done=kill@2").join(PATIENCE)
    (work,) = CacheFolder(Path(to().cache.output)).works()
    age(work.plan)
    before = work.plan.read_text()
    with pytest.raises(
        FingerprintError, match=r"made by an older align.*Remove .*unfinished"
    ) as at:
        run(to(seed=1))
    assert str(work.root) in str(at.value)
    assert work.plan.read_text() == before


def test_the_manifest_of_an_earlier_cache_is_read_once(to, tmp_path, monkeypatch):
    run(to())
    reads = []
    monkeypatch.setattr(
        cache_compatibility, "load_manifest", lambda f: reads.append(f) or load_manifest(f)
    )
    assert run(to(output=str(tmp_path / "b"), reuse_known=True)).tally.scored == 0
    assert [folder.root for folder in reads] == [Path(to().cache.output)]


def scores(folder):
    """What a cache says of each row."""
    return {
        row["row_id"]: (row["completion_ids"], row["ref_logp"], row.get("ref_token_logps"))
        for shard in shards_of(folder)
        for row in pq.read_table(shard).to_pylist()
    }


def test_one_index_of_other_rings_is_built_once_and_kept(to, tmp_path, monkeypatch):
    first = run(to(seed=5, token_logps=False))
    run(to(token_logps=False, output=str(tmp_path / "b"), rows_per_shard=50))
    reads = []
    monkeypatch.setattr(reuse, "SHARDS_KEPT_OPEN", 1)
    monkeypatch.setattr(reuse, "check_shard", lambda _, commit: reads.append(commit.file))
    both = [to().cache.output, str(tmp_path / "b")]
    last = run(to(token_logps=False, output=str(tmp_path / "c"), reuse=both))
    assert last.tally.scored == 0
    assert len(first.manifest.shards) > 4
    of_other_ring = {shard.file for shard in first.manifest.shards}
    assert all(reads.count(file) <= 1 for file in of_other_ring)


def test_a_list_of_caches_that_cannot_be_written_fails_nothing(to, tmp_path, monkeypatch, warnings):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "file" / "home"))
    assert run(to()).manifest.rows == 120
    assert [to().cache.output in line for line in warnings()] == [True]


def test_a_list_of_caches_may_hold_anything(to, tmp_path, monkeypatch, warnings):
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    run(to())
    folder = CacheFolder(Path(to().cache.output))
    (tmp_path / "caches.txt").write_bytes(b"\xff\xfe\n\n/none\n" + b"x" * 5000 + b"\n")
    register_cache(folder)
    other = CacheFolder(tmp_path / "other")
    offered = candidates(to(reuse_known=True).cache, other)
    assert offered == (str(other.root), str(folder.root.resolve()))
    assert warnings() == []


@pytest.fixture
def long_form(config, tmp_path):
    """Makes a cache of long-form rows, always in the same folder."""
    path = tmp_path / "long.jsonl"

    def make(*rows):
        lines = [dict(zip(("prompt", "completion", "score"), row, strict=True)) for row in rows]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        return run(replace(config, data=DataOptions(files=[str(path)])))

    return make


OLD = [
    ("Why?", "because", 1.0),
    ("Why?", "so", 2.0),
    ("How?", "thus", 0.5),
    ("How?", "well", 1.5),
    ("Who?", "me", 1.0),
]


def test_a_prompt_may_gain_a_completion(long_form):
    long_form(*OLD)
    grown = long_form(*OLD, ("Why?", "never mind", 3.0))
    assert (grown.manifest.rows, grown.tally.reused >= 5) == (3, True)


def test_a_prompt_may_not_lose_a_completion(long_form, config):
    long_form(*OLD)
    before = contents(Path(config.cache.output) / "data")
    with pytest.raises(FingerprintError, match="1 of its 5 completions are not in the data"):
        long_form(*OLD[1:], ("Why?", "never mind", 3.0))
    assert contents(Path(config.cache.output) / "data") == before


def test_a_lost_copy_of_a_row_is_noticed(config, data, tmp_path):
    path = tmp_path / "data.jsonl"
    lines = data.paired_jsonl.read_text().splitlines()[:20]
    twice = replace(config, data=DataOptions(files=[str(path)]))
    path.write_text("\n".join([*lines, lines[0]]) + "\n")
    assert run(twice).manifest.rows == 21
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(FingerprintError, match="1 of its 21 rows"):
        run(twice)
    assert load_manifest(CacheFolder(Path(config.cache.output))).rows == 21


@pytest.mark.parametrize("name", ["model.weights", "numerics.torch"])
def test_only_scores_of_the_same_reference_are_reported_as_copied(name):
    with pytest.raises(FingerprintError, match="everything is scored again") as caught:
        require_same_or_growing({name: "a"}, {name: "b"}, where="/cache")
    assert "copied" not in str(caught.value)
    with pytest.raises(FingerprintError, match="copied, not computed again"):
        require_same_or_growing({"tokens.bos": "a"}, {"tokens.bos": "b"}, where="/cache")
