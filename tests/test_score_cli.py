"""`align score`: completions get the scores of a reward model, or of their labels."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from support.command import align, refusal
from support.mlflow_runs import open_store, the_run


def test_mlflow_hears_that_it_is_scoring(world, reward_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # artifacts lie where it was started
    uri = f"sqlite:///{tmp_path}/runs.db"
    options = ("--reward-model", reward_model, "--set", f"tracking.uri={uri}")
    answer = align("score", world.data.paired, "--output", tmp_path / "out", *options)
    assert answer.code == 0, answer
    run = the_run(open_store(uri), "align")
    assert (run.info.run_name, run.data.tags["align.stage"]) == ("score", "score")


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def score(data, folder, *more):
    answer = align("score", data, "--output", folder, "--no-mlflow", *more)
    assert answer.code == 0, answer
    return answer


@pytest.mark.parametrize("shape", ["paired", "unpaired", "scored", "paired_chat"])
def test_scores_are_those_of_the_model_itself(world, reward_model, tmp_path, shape):
    data = getattr(world.data, shape)
    score(data, tmp_path / "out", "--reward-model", reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    rows = rows_of(tmp_path / "out")
    assert len(rows) == pq.read_metadata(data).num_rows
    for row in rows[:5]:
        for completion, own in zip(row["completions"], row["scores"], strict=True):
            with torch.no_grad():
                wanted = model(torch.tensor([ids_of(tokenizer, row["prompt"], completion)])).logits
            assert own == pytest.approx(wanted.item(), abs=1e-4)


def ids_of(tokenizer, prompt, completion):
    """The text as a person would tokenize it, with one EOS at its end."""
    if isinstance(prompt, str):
        return [*tokenizer(prompt + completion).input_ids, tokenizer.eos_token_id]
    ids = tokenizer.apply_chat_template([*prompt, *completion], return_dict=False)
    end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
    return ids[:end]


def test_scored_data_is_data_to_precompute_and_learn_from(world, reward_model, tmp_path):
    score(world.data.paired, tmp_path / "out", "--reward-model", reward_model)
    cache, scored = tmp_path / "cache", tmp_path / "out" / "rows.jsonl"
    made = ("--model", world.model, "--output", cache, "--token-logps", "--no-mlflow")
    assert align("precompute-ref", scored, *made).code == 0
    run = ("--cache", cache, "--output", tmp_path / "run", "--max-steps", 1, "--no-mlflow")
    answer = align("train", "--method", "grpo", *run)
    assert answer.code == 0, answer


def test_what_was_scored_once_is_kept(world, reward_model, tmp_path):
    first = score(world.data.paired, tmp_path / "out", "--reward-model", reward_model)
    again = score(world.data.paired, tmp_path / "out", "--reward-model", reward_model)
    assert "scoring" in first.err
    assert "scoring" not in again.err
    assert again.out == first.out


def test_labels_are_scores_too(world, tmp_path):
    score(world.data.paired, tmp_path / "pairs", "--from-labels")
    assert {tuple(row["scores"]) for row in rows_of(tmp_path / "pairs")} == {(1.0, -1.0)}
    score(world.data.unpaired, tmp_path / "labels", "--from-labels")
    labels = pq.read_table(world.data.unpaired)["label"].to_pylist()
    assert [row["scores"] for row in rows_of(tmp_path / "labels")] == [
        [1.0 if label else -1.0] for label in labels
    ]


def test_rows_that_cannot_be_used_are_counted(tmp_path):
    table = pa.table({"prompt": ["a", None], "chosen": ["b", "b"], "rejected": ["c", "c"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    answer = score(tmp_path / "rows.parquet", tmp_path / "out", "--from-labels")
    assert "left out as unusable: 1 row" in answer.out


def test_candidates_need_no_scores_to_be_scored(reward_model, tmp_path):
    table = pa.table({"prompt": ["Say yes."], "completions": [[" Yes.", " No.", " Well."]]})
    pq.write_table(table, tmp_path / "rows.parquet")
    score(tmp_path / "rows.parquet", tmp_path / "out", "--reward-model", reward_model)
    (row,) = rows_of(tmp_path / "out")
    assert len(row["scores"]) == 3


def test_refusals(world, reward_model, tmp_path):
    paired, out = world.data.paired, ("--output", tmp_path / "out", "--no-mlflow")
    assert "one of them" in refusal(2, "score", paired, *out)
    both = ("--from-labels", "--reward-model", reward_model)
    assert "not both" in refusal(2, "score", paired, *both, *out)
    assert "is not a reward model" in refusal(
        2, "score", paired, "--reward-model", world.model, *out
    )
    assert "has no labels" in refusal(2, "score", world.data.scored, "--from-labels", *out)
    long = refusal(2, "score", world.data.scored_long, "--reward-model", reward_model, *out)
    assert "a score for each" in long
    nowhere = ("--output", tmp_path / "no" / "where", "--no-mlflow")
    assert "parent" in refusal(2, "score", paired, "--from-labels", *nowhere)
