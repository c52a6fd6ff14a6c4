"""The way of a person with a data file, an align.yaml beside it, and nothing else."""

import json
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq

from align.schemas.config import Config, DataOptions, ModelOptions
from align.schemas.json_codec import to_json
from align.stages.storage.fs import sha256_of
from support.command import align, launch, refusal
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


def test_libraries_it_has_no_use_for_are_not_loaded(world, tmp_path):
    data, output = world.data.paired, tmp_path / "cache"
    options = ("--model", world.model, "--output", output, "--set", "tracking.mlflow=false")
    told = (sys.executable, "-X", "importtime", "-m", "align")
    answer = launch("precompute-ref", data, *options, program=told, cwd=tmp_path)
    assert answer.code == 0, answer
    loaded = {line.rpartition("|")[2].strip() for line in answer.err.splitlines()}
    assert {"torch", "pyarrow.parquet", "transformers"} <= loaded
    assert not loaded & {"scipy", "pandas", "sklearn", "pyarrow.compute", "mlflow", "deepspeed"}


def test_a_log_gets_plain_lines(journey):
    said = journey.answer.out + journey.answer.err
    assert said.isprintable() or set(filter(lambda c: not c.isprintable(), said)) == {"\n"}
    lines = journey.answer.err.splitlines()
    row = [line for line in lines if line.startswith(("row ", "  "))]
    assert [line.partition(",")[0] for line in row[1:]] == [
        *("  prompt", "  chosen", "  rejected", "  mismatched")
    ]
    begin = lines.index(row[0])
    assert lines[begin : begin + 5] == row
    assert lines[begin + 5].startswith("scoring: ")  # begins
    lines = [line for line in lines if line not in row and not line.startswith("note: ")]
    assert [line.partition(":")[0] for line in lines] == [
        "reading and tokenizing",
        "reading and tokenizing",
        "sorting",
        "sorting",
        "scoring",
        "reference",
        "scoring",
    ]
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


def test_the_same_from_python_is_the_same_cache(journey, world, tmp_path):
    """What the command did is what the config alone says."""
    manifest = json.loads((journey.cache / "manifest.json").read_text())
    assert manifest["fingerprint"]["cache.rows_per_shard"] == "8"
    assert manifest["inputs"][0]["name"] == "data.parquet"
    assert manifest["inputs"][0]["sha256"] == sha256_of(world.data.paired)
    defaults = Config(model=ModelOptions(path=str(world.model)), data=DataOptions())
    for name in ("max_length", "prompt_side", "bos", "eos", "boundary"):
        assert manifest["fingerprint"][f"tokens.{name}"] == str(getattr(defaults.tokens, name))


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
    other = tmp_path / "other"
    shutil.copytree(world.model, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    said = refusal(4, "verify", journey.cache, "--model", other)
    assert "not scored by this reference" in said
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
    assert {"prompt", "chosen", "rejected", "ref_chosen_logps", "ref_rejected_logps"} <= set(
        table.column_names
    )
    source = pq.read_table(journey.folder / "data.parquet").to_pylist()
    assert {row["chosen"].strip() for row in table.to_pylist()} == {
        row["chosen"].strip() for row in source
    }
    assert "exists" in refusal(2, "export", journey.cache)
    assert align("export", journey.cache, "--overwrite").code == 0


def test_the_tiny_world_is_made_by_one_command(tmp_path):
    said = refusal(2, "tiny-world", tmp_path.parent)
    assert "is not empty" in said
