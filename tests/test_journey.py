"""The way of a person with a data file, an align.yaml beside it, and nothing else."""

import json
import shutil

import pyarrow.parquet as pq

from support.command import align, refusal
from support.stage_one import contents


def test_no_flag_is_needed_and_nothing_is_written_but_the_cache_and_the_store(journey):
    assert journey.answer.code == 0, journey.answer
    assert "60 rows, 240 branches" in journey.answer.out
    assert "scored 240 branches, reused 0 of 240" in journey.answer.out
    said = journey.answer.out + journey.answer.err
    assert said.replace("\n", "").isprintable()  # as a log wants it
    assert {path.name for path in journey.cache.iterdir()} == {"manifest.json", "data", "_align"}
    assert {path.name for path in journey.cwd.iterdir()} <= {"home", "mlflow.db", "mlruns"}
    names = {path.name for path in journey.folder.iterdir()} - {"cache-trl.parquet"}
    assert names == {"align.yaml", "data.parquet", "cache"}
    rows = pq.read_table(journey.cache / "data").to_pylist()
    assert sorted(row["source"]["row"] for row in rows) == list(range(60))
    for row in rows:
        assert row["role"] == [0, 1, 5, 5]
        assert row["num_tokens"] == [len(ids) for ids in row["completion_ids"]]
        assert all(logp < 0 for logp in row["ref_logp"])
    before = contents(journey.cache)
    again = align("precompute-ref", journey.folder / "data.parquet", "--no-mlflow")
    assert (again.code, again.err) == (0, ""), again
    assert "already complete: nothing was scored" in again.out
    assert contents(journey.cache) == before


def test_inspect_shows_it_to_people_and_to_programs(journey):
    assert "mismatched" in align("inspect", journey.cache).out
    summary = json.loads(align("inspect", journey.cache, "--json").out)
    assert (summary["rows"], summary["branches"], summary["shards"]) == (60, 240, 8)
    assert set(summary["roles"]) == {"chosen", "rejected", "mismatched"}


def test_verify_scores_a_sample_again(journey, world, tmp_path):
    answer = align("verify", journey.cache)
    assert answer.code == 0, answer
    assert "64 branches scored again" in answer.out  # 16 rows of 4
    assert "240 branches scored again" in align("verify", journey.cache, "--rescore", "60").out
    assert "scored again" not in align("verify", journey.cache, "--rescore", "0").out
    other = shutil.copytree(world.model, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    said = refusal(4, "verify", journey.cache, "--model", other)
    assert "model.weights: the cache has" in said


def test_verify_reads_the_settings_beside_the_cache(world, tmp_path):
    settings = f"model:\n  path: {world.model}\n  trust_remote_code: true\n"
    (tmp_path / "align.yaml").write_text(settings)
    data = shutil.copy(world.data.paired, tmp_path)
    made = align("precompute-ref", data, "--no-mlflow", "--quiet", "--output", tmp_path / "cache")
    assert made.code == 0
    assert "64 branches scored again" in align("verify", tmp_path / "cache").out
    distrustful = ["--set", "model.trust_remote_code=false"]
    assert "model.code: the cache has" in refusal(4, "verify", tmp_path / "cache", *distrustful)


def test_export_writes_what_trl_reads(journey):
    answer = align("export", journey.cache, "--to", "trl")
    assert answer.code == 0, answer
    target = journey.folder / "cache-trl.parquet"
    assert str(target) in answer.out
    assert {"prompt", "ref_chosen_logps", "ref_rejected_logps"} <= {*pq.read_schema(target).names}
    tables = [pq.read_table(path) for path in (target, journey.folder / "data.parquet")]
    for name in ("chosen", "rejected"):
        written, given = ({one.strip() for one in each[name].to_pylist()} for each in tables)
        assert written == given
    assert str(target) in refusal(2, "export", journey.cache)
    assert align("export", journey.cache, "--overwrite").code == 0
