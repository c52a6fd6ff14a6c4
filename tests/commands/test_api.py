"""`import align` in a notebook: both stages, caches and runs as frames."""

import json
import shutil

import polars as pl
import pytest

import align
from align.pipeline.precompute.export import export
from align.schemas.errors import CorruptionError, UsageError
from support.refusals import refuses

QUIET = {"tracking.mlflow": False}
MAKING = QUIET | {"tokens.max_length": 256, "cache.shards": 8, "cache.reuse_known": False}
SHORT = QUIET | {
    "train.max_steps": 3,
    "train.batch_size": 8,
    "train.dtype": "float32",
    "train.lr": 1e-3,
    "train.eval_fraction": 0.2,
    "train.save_every": 1,
}


@pytest.fixture(scope="module")
def made_cache(world, tmp_path_factory):
    output = tmp_path_factory.mktemp("api") / "cache"
    return align.precompute(
        world.data.paired, model=world.model, output=output, settings=MAKING, progress=False
    )


@pytest.fixture(scope="module")
def resumed_run(made_cache, tmp_path_factory):
    """A run that its callback ended after two steps, gone on with to its end; what was heard."""
    asked = {"cache": made_cache.folder, "output": tmp_path_factory.mktemp("api") / "run"}
    heard = []

    def hear(step, metrics):
        heard.append((step, dict(metrics)))
        if step == 2 and not any(step == 2 for step, _ in heard[:-1]):
            raise RuntimeError("enough of https://me:canary@127.0.0.1")

    with pytest.raises(RuntimeError, match="enough"):
        align.train("dpo", **asked, settings=SHORT, callbacks=[hear], progress=False)
    assert [step for step, metrics in heard if "loss" in metrics] == [1, 2]
    ended = align.load_run(asked["output"])
    assert (ended.steps, ended.ending, ended.model) == (2, "failed", None)
    assert "RuntimeError: enough" in (ended.folder / "report.html").read_text()
    files = [path for path in ended.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if b"canary" in path.read_bytes()]
    settings = SHORT | {"train.resume": "auto"}
    return align.train("dpo", **asked, settings=settings, callbacks=[hear], progress=False), heard


def test_what_is_public_can_be_listed_and_found():
    assert {*align.__all__, "__version__"} <= {*dir(align)}
    assert all(getattr(align, name) is getattr(align, name) for name in align.__all__)
    with refuses(AttributeError, "trian"):
        _ = align.trian


def test_precompute_returns_where_the_cache_is_and_finds_it_again(made_cache, world):
    assert (made_cache.folder.is_dir(), made_cache.manifest.rows) == (True, 60)
    assert made_cache.manifest.fingerprint["tokens.max_length"] == "256"
    same = {"model": str(world.model), "output": made_cache.folder, "settings": MAKING}
    again = align.precompute([world.data.paired], **same, progress=False)
    assert again.was_complete
    assert again.manifest == made_cache.manifest


def test_precompute_takes_rows_and_knows_them_again(made_cache, world, tmp_path):
    rows = pl.read_parquet(world.data.paired).head(8)
    same = {"model": world.model, "output": tmp_path / "cache", "settings": MAKING}
    made = align.precompute(rows, **same, progress=False)
    assert made.manifest.rows == 8
    assert align.precompute(rows.to_dicts(), **same, progress=False).was_complete
    known = align.load_cache(made_cache.folder).select("prompt_ids", "chosen_ids").collect()
    found = align.load_cache(made.folder).select("prompt_ids", "chosen_ids").collect()
    assert found.join(known, on=found.columns).height == 8


def test_a_cache_is_the_frame_that_export_writes(made_cache, tmp_path):
    target = tmp_path / "trl.parquet"
    export(made_cache.folder, target, model=None, overwrite=False)
    exported = pl.read_parquet(target)
    assert align.load_cache(made_cache.folder, text=True).collect().equals(exported)
    plain = align.load_cache(made_cache.folder)
    assert isinstance(plain, pl.LazyFrame)
    names = [name for name, kind in exported.schema.items() if kind != pl.String]
    assert plain.collect().equals(exported.select("row_id", *names))
    assert "PROJECT 2/" in plain.select("row_id", "prompt_cut").explain()  # it reads no others


def test_only_files_that_a_whole_manifest_names_are_read(made_cache, tmp_path):
    copy = shutil.copytree(made_cache.folder, tmp_path / "copy")
    shard = next((copy / "data").iterdir())
    (copy / "data" / "part-00000099-0123456789abcdef.parquet").write_bytes(b"other")
    assert align.load_cache(copy).collect().height == made_cache.manifest.rows
    shard.unlink()
    with refuses(CorruptionError, shard.name):
        align.load_cache(copy)
    with refuses(UsageError, copy / "data", "cache"):
        align.load_cache(copy / "data")


def test_a_run_is_read_back_as_frames(resumed_run):
    run, heard = resumed_run
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    written = [(line.pop("step"), {k: v for k, v in line.items() if k != "time"}) for line in lines]
    assert all(line in heard for line in written)
    assert (run.ending, run.steps) == ("finished", 3)
    assert run.metrics["step"].to_list() == [1, 2, 3]
    assert run.metrics["time"].is_sorted()
    assert run.metrics["loss"].dtype == pl.Float64
    assert not [name for name in run.metrics.columns if name.startswith("eval/")]
    assert run.evaluations["step"].to_list()[-1] == 3
    assert run.evaluations["eval/loss"].null_count() == 0
    assert set(run.samples["step"]) == set(run.evaluations["step"])
    last = run.samples.filter(step=3, role="chosen")
    assert last["logp"].mean() == pytest.approx(run.evaluations["eval/logps/chosen"][-1])
    assert run.settings["train.lr"] == 1e-3
    assert (run.model / "model.safetensors").is_file()


def test_the_log_probs_of_a_cache_give_the_loss_before_the_first_step(made_cache, resumed_run):
    rows = align.load_cache(made_cache.folder).head(8).collect()
    chosen, rejected = (rows[f"ref_{name}_logps"].to_numpy() for name in ("chosen", "rejected"))
    losses = align.losses.dpo(chosen, rejected, chosen, rejected)
    run, _ = resumed_run
    assert losses.mean().item() == pytest.approx(run.evaluations["eval/loss"][0], abs=1e-4)
