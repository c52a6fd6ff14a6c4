"""Log-probs of another program become a cache only where the reference has them too."""

import json
import re
import shutil

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import align
from align.stages.storage.cache import Cache
from support.command import refusal, success
from support.tracked_training import logged_numbers

SIDES = ("chosen", "rejected")
MADE = ("--no-mlflow", "--set", "cache.shards=2")


@pytest.fixture(scope="module")
def scored(world, tmp_path_factory):
    """A cache of the reference, of pairs."""
    made = tmp_path_factory.mktemp("scored") / "cache"
    success("precompute-ref", world.data.paired, "--model", world.model, "--output", made, *MADE)
    return made


@pytest.fixture(scope="module")
def table(scored, world):
    """The pairs as TRL tokenizes them, with float32 sums of the model's log-probs."""
    model = AutoModelForCausalLM.from_pretrained(world.model, dtype="float32").eval()

    @torch.inference_mode()
    def logp(prompt, completion):
        ids = torch.tensor([[*prompt, *completion]])
        logps = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return logps.gather(-1, ids[0, len(prompt) :, None]).sum().item()

    rows = align.load_cache(scored).collect()
    each = [
        [logp(row["prompt_ids"], row[f"{side}_ids"]) for side in SIDES]
        for row in rows.iter_rows(named=True)
    ]
    logps = pl.DataFrame(each, {f"ref_{side}_logps": pl.Float32 for side in SIDES}, orient="row")
    ids = rows.select("prompt_ids", "chosen_ids", "rejected_ids")
    return pl.concat([ids, logps], how="horizontal")


@pytest.fixture
def words(world, tmp_path):
    """The words that import a table."""

    def given(rows, name="table.parquet", *more, data=world.data.paired):
        path = tmp_path / name
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            rows.write_parquet(path)
        output = ("--output", tmp_path / "cache", "--model", world.model)
        return ("import-ref", data, "--logps", path, *output, *MADE, *more)

    return given


@pytest.fixture
def numbered(table, scored):
    """The log-probs in the order of the data file."""
    blocks = Cache(scored).sample_rows(Cache(scored).manifest(), len(table))
    numbers = np.concatenate([block.row for _, block in blocks])
    return table.with_columns(number=pl.Series(numbers)).sort("number")


def reused(said):
    return int(re.search(r"reused (\d+) of", said)[1])


def test_an_imported_cache_trains_to_the_same_numbers(table, words, scored, world, tmp_path):
    said = success(*words(table.reverse())).out
    assert reused(said) >= 2 * len(table)  # the partners are not in the table
    imported = tmp_path / "cache"
    success("verify", imported, "--rescore", len(table))
    runs = [tmp_path / "run", tmp_path / "beside"]
    for cache, run in zip((imported, scored), runs, strict=True):
        steps = ("--max-steps", 2, "--batch-size", 8, "--lr", 1e-3, "--no-mlflow")
        success("train", "--method", "kto", "--cache", cache, "--output", run, *steps)
    numbers, beside = (
        [one for one in logged_numbers(run) if one[0] in ("loss", "kl")] for run in runs
    )
    assert [value for _, _, value in numbers] == pytest.approx(
        [value for _, _, value in beside], abs=1e-5
    )


def test_no_other_cache_copies_imported_log_probs(table, words, world, tmp_path):
    success(*words(table))
    imported, own = tmp_path / "cache", tmp_path / "own"
    reuse = ("--reuse", imported, "--output", own, "--set", "cache.reuse_known=false", *MADE)
    said = success("precompute-ref", world.data.paired, "--model", world.model, *reuse).out
    assert reused(said) < len(table)  # equal completions of a shard are
    keys = [Cache(one).manifest().reference_key for one in (imported, own)]
    assert keys[0] != keys[1]
    summary = json.loads(success("inspect", imported, "--json").out)
    assert "imported.logps" in summary["fingerprint"]
    names = ("imported.logps",)
    again = ("precompute-ref", world.data.paired, "--model", world.model, "--output", imported)
    refusal(4, *again, *MADE, names=names)


def mean(table):
    lengths = {side: pl.col(f"{side}_ids").list.len() for side in SIDES}
    return table.with_columns(pl.col(f"ref_{side}_logps") / lengths[side] for side in SIDES)


def shifted(table):
    names = [f"ref_{side}_logps" for side in SIDES]
    return table.with_columns(pl.col(names).shift(1, fill_value=-9.0))


def longest_cut(table):
    size = pl.col("prompt_ids").list.len() + pl.col("chosen_ids").list.len()
    wrong = pl.when(size == size.max()).then(pl.col("ref_chosen_logps") / 2)
    return table.with_columns(ref_chosen_logps=wrong.otherwise(pl.col("ref_chosen_logps")))


@pytest.mark.parametrize("wrong", [mean, shifted, longest_cut])
def test_other_log_probs_are_refused_before_anything_is_written(table, words, tmp_path, wrong):
    refusal(4, *words(wrong(table), "table.parquet", "--rescore", 8), names=("table.parquet",))
    assert not (tmp_path / "cache").exists()


def test_log_probs_of_another_model_are_refused(table, words, world, tmp_path):
    other = shutil.copytree(world.model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights = {name: 1.01 * weight for name, weight in weights.items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    refusal(4, *words(table), "--model", other, names=("table.parquet",))


def test_a_table_of_other_tokens_is_refused(table, words, tmp_path):
    ids = pl.col("prompt_ids").list.concat(pl.lit(5))
    refusal(4, *words(table.with_columns(prompt_ids=ids)), names=("table.parquet", "align check"))
    assert not (tmp_path / "cache").exists()


def test_row_numbers_find_rows_and_rows_without_a_score_are_scored(numbered, words, tmp_path):
    """As Megatron-Bridge writes them: for a row that it cannot use it scores two padding tokens."""
    rows = [
        {
            "pair_id": row["number"],
            **{f"ref_{side}_logprob_sum": row[f"ref_{side}_logps"] for side in SIDES},
            **{f"ref_{side}_num_tokens": len(row[f"{side}_ids"]) for side in SIDES},
        }
        for row in numbered.iter_rows(named=True)
    ]
    for side in SIDES:
        rows[7] |= {f"ref_{side}_logprob_sum": -1.5, f"ref_{side}_num_tokens": 1}
    said = success(*words(rows[::-1], "table.jsonl", "--kl-pairs", 0)).out
    assert f"scored 2 completions, reused {2 * len(rows) - 2} of" in said
    success("verify", tmp_path / "cache", "--rescore", len(rows))


def test_a_table_without_ids_is_in_the_order_of_the_data(numbered, words):
    """As open-instruct writes them."""
    plain = numbered.select(**{f"{side}_logps": f"ref_{side}_logps" for side in SIDES})
    refusal(4, *words(plain.reverse()), names=("table.parquet",))
    refusal(2, *words(plain.head(9)), names=("table.parquet", "9", str(len(plain))))
    said = success(*words(plain, "table.parquet", "--kl-pairs", 0)).out
    assert f"reused {2 * len(plain)} of" in said


def test_a_table_without_log_probs_is_refused(table, words):
    refusal(2, *words(table.select("prompt_ids", "chosen_ids")), names=("ref_chosen_logps",))
