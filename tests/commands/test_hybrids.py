"""Models with recurrent layers beside attention, through both stages, and read by transformers."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.families import HYBRID_FAMILIES, tiny_model

RUNS = (
    ("--method", "kto"),
    ("--method", "dpo", "--lora", "--merge"),
    ("--method", "orpo", "--set", "train.gradient_checkpointing=true"),
)
SHORT = ("--batch-size", 8, "--max-steps", 2, "--lr", 1e-2, "--no-mlflow")


def made(server, world, folder, name):
    """Makes a model with the tokenizer of the world, and a cache of its log-probs."""
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    kind, settings = HYBRID_FAMILIES[name]
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = tiny_model(kind, {**settings, **tokens, "max_position_embeddings": 1024})
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    reference = ("--model", folder / "model", "--output", folder / "cache", "--no-mlflow")
    server.success("precompute-ref", world.data.paired, *reference)


def lines_of(folder):
    return [json.loads(one) for one in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_a_hybrid_is_trained_by_each_method_and_read_by_others(server, world, tmp_path, name):
    made(server, world, tmp_path, name)
    of_cache = ("train", "--cache", tmp_path / "cache", "--set", "train.dtype=float32", *SHORT)
    runs = [
        server.start(*of_cache, *run, "--output", tmp_path / str(number))
        for number, run in enumerate(RUNS)
    ]
    for run in runs:
        (answer,) = run.answers()
        assert answer.code == 0, answer
    for number, run in enumerate(RUNS):
        folder = tmp_path / str(number)
        assert any(line.get("grad_norm", 0) > 0 for line in lines_of(folder))
        saved = folder / ("model-merged" if "--merge" in run else "model")
        _, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(report.values()), report


def test_ranks_under_zero_3_train_as_one_rank_does(server, world, tmp_path):
    made(server, world, tmp_path, "qwen3_5")
    of_cache = ("train", "--cache", tmp_path / "cache", "--set", "train.dtype=float32", *SHORT)
    losses = []
    for ranks, stage in ((1, "zero0"), (2, "zero3")):
        how = ("--method", "dpo", "--deepspeed", stage, "--output", tmp_path / stage)
        for answer in server.start(*of_cache, *how, ranks=ranks).answers():
            assert answer.code == 0, answer
        losses.append([line["loss"] for line in lines_of(tmp_path / stage) if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
