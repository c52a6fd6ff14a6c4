"""The way of a person with a data file, an align.yaml beside it, and nothing else."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq

from align.schemas.config import Config
from align.schemas.json_codec import to_json
from align.stages.storage.fs import sha256_of
from support.command import align, refusal
from support.stage_one import contents

COLUMNS = {
    "row_id": pa.string(),
    "source": pa.struct([("file", pa.string()), ("row", pa.int64())]),
    "prompt_key": pa.binary(16),
    "split_key": pa.uint64(),
    "prompt_sketch": pa.uint64(),
    "prompt_tokens": pa.int32(),
    "prompt_ids": pa.list_(pa.int32()),
    "prompt_cut": pa.int32(),
    "completion_ids": pa.list_(pa.list_(pa.int32())),
    "role": pa.list_(pa.int8()),
    "score": pa.list_(pa.float64()),
    "cut": pa.list_(pa.int32()),
    "num_tokens": pa.list_(pa.int32()),
    "ref_logp": pa.list_(pa.float64()),
}


def plain(kind):
    """A type without field names and nullability."""
    if pa.types.is_list(kind):
        return ("list", plain(kind.value_type))
    if pa.types.is_struct(kind):
        return tuple((field.name, plain(field.type)) for field in kind)
    return kind


def test_no_flag_is_needed(journey):
    assert journey.answer.code == 0, journey.answer
    assert "60 rows, 240 branches" in journey.answer.out
    assert "scored 240 branches, reused 0 of 240" in journey.answer.out
    names = {path.name for path in journey.cache.iterdir()}
    assert names == {"manifest.json", "data", "_align"}
    assert len(list((journey.cache / "data").glob("part-*.parquet"))) == 8  # 60 rows, 8 a shard


def test_a_log_gets_plain_lines(journey):
    said = journey.answer.out + journey.answer.err
    assert said.replace("\n", "").isprintable()
    lines = journey.answer.err.splitlines()
    row = [line for line in lines if line.startswith(("row ", "  "))]  # as the model reads it
    begin = lines.index(row[0])
    assert lines[begin : begin + 5] == row
    assert [line.partition(",")[0].strip() for line in row[1:]] == [
        *("prompt", "chosen", "rejected", "mismatched")
    ]
    begun = list(dict.fromkeys(line.partition(":")[0] for line in lines if ": " in line))
    order = ["reading and tokenizing", "sorting", "scoring", "reference"]
    assert [step for step in begun if step in order] == order
    assert "reference: layout packed, head fused" in journey.answer.err
    assert "tokens/s" in lines[-1]


def test_nothing_is_written_but_the_cache_and_the_store(journey):
    assert {path.name for path in journey.cwd.iterdir()} <= {"home", "mlflow.db", "mlruns"}
    names = {path.name for path in journey.folder.iterdir()} - {"cache-trl.parquet"}
    assert names == {"data.parquet", "align.yaml", "cache"}


def test_the_shards_have_the_promised_columns(journey):
    table = pq.read_table(journey.cache / "data")
    assert {f.name: plain(f.type) for f in table.schema} == {
        name: plain(kind) for name, kind in COLUMNS.items()
    }
    rows = table.to_pylist()
    assert sorted(row["source"]["row"] for row in rows) == list(range(60))
    for row in rows:
        assert row["role"] == [0, 1, 5, 5]
        assert row["num_tokens"] == [len(ids) for ids in row["completion_ids"]]
        assert all(logp < 0 for logp in row["ref_logp"])


def test_a_second_run_does_nothing(journey):
    before = contents(journey.cache)
    again = align("precompute-ref", journey.folder / "data.parquet", "--no-mlflow")
    assert again.code == 0, again
    assert "already complete: nothing was scored" in again.out
    assert again.err == ""
    assert contents(journey.cache) == before


def test_the_manifest_holds_what_the_cache_was_made_of(journey, world):
    manifest = json.loads((journey.cache / "manifest.json").read_text())
    assert manifest["fingerprint"]["cache.rows_per_shard"] == "8"
    assert manifest["inputs"][0]["name"] == "data.parquet"
    assert manifest["inputs"][0]["sha256"] == sha256_of(world.data.paired)
    for name in ("max_length", "prompt_side", "bos", "eos", "boundary"):
        assert manifest["fingerprint"][f"tokens.{name}"] == str(getattr(Config().tokens, name))


def test_inspect_shows_it_to_people_and_to_programs(journey):
    shown = align("inspect", journey.cache)
    assert shown.code == 0
    for word in ("Cache", "Rows", "Lengths", "Truncation", "Balance", "log-probs", "Drops"):
        assert word in shown.out
    as_json = align("inspect", journey.cache, "--json")
    summary = json.loads(as_json.out)
    assert (summary["rows"], summary["branches"], summary["shards"]) == (60, 240, 8)
    assert set(summary["roles"]) == {"chosen", "rejected", "mismatched"}
    assert as_json.out == to_json(summary)


def test_verify_scores_a_sample_again(journey):
    answer = align("verify", journey.cache)
    assert answer.code == 0, answer
    assert "64 branches scored again" in answer.out  # 16 rows of 4
    whole = align("verify", journey.cache, "--rescore", "60")
    assert "240 branches scored again" in whole.out
    assert "scored again" not in align("verify", journey.cache, "--rescore", "0").out


def test_verify_with_another_reference_is_refused(journey, world, tmp_path):
    other = shutil.copytree(world.model, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    said = refusal(4, "verify", journey.cache, "--model", other)
    assert "model.weights: the cache has" in said


def test_verify_reads_the_settings_beside_the_cache(world, tmp_path):
    lines = ["model:", f"  path: {world.model}", "  trust_remote_code: true"]
    (tmp_path / "align.yaml").write_text("\n".join(lines))
    shutil.copy(world.data.paired, tmp_path / "data.parquet")
    arguments = ["--no-mlflow", "--quiet", "--output", tmp_path / "cache"]
    answer = align("precompute-ref", tmp_path / "data.parquet", *arguments)
    assert answer.code == 0
    assert "scoring: 60 rows" in answer.err
    assert "as the model reads it" not in answer.err
    assert "64 branches scored again" in align("verify", tmp_path / "cache").out
    distrustful = ["--set", "model.trust_remote_code=false"]
    assert "model.code: the cache has" in refusal(4, "verify", tmp_path / "cache", *distrustful)


def test_export_writes_what_trl_reads(journey):
    answer = align("export", journey.cache, "--to", "trl")
    assert answer.code == 0, answer
    target = journey.folder / "cache-trl.parquet"
    assert str(target) in answer.out
    table = pq.read_table(target)
    reads = {"prompt", "chosen", "rejected", "ref_chosen_logps", "ref_rejected_logps"}
    assert reads <= set(table.column_names)
    source = pq.read_table(journey.folder / "data.parquet")
    for name in ("chosen", "rejected"):
        texts = ({text.strip() for text in one[name].to_pylist()} for one in (table, source))
        assert next(texts) == next(texts)
    assert str(target) in refusal(2, "export", journey.cache)
    assert align("export", journey.cache, "--overwrite").code == 0
