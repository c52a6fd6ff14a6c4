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


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_a_hybrid_is_trained_by_each_method_and_read_by_others(server, world, tmp_path, name):
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    kind, settings = HYBRID_FAMILIES[name]
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = tiny_model(kind, {**settings, **tokens, "max_position_embeddings": 1024})
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    reference = ("--model", tmp_path / "model", "--output", tmp_path / "cache", "--no-mlflow")
    server.success("precompute-ref", world.data.paired, *reference)

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
        lines = [json.loads(one) for one in (folder / "metrics.jsonl").read_text().splitlines()]
        assert any(line.get("grad_norm", 0) > 0 for line in lines), lines
        saved = folder / ("model-merged" if "--merge" in run else "model")
        _, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(report.values()), report
