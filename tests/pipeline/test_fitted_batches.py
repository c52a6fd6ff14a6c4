"""What a run notes of its memory for its next start, and what it advises."""

import json
import re

import pytest
import torch

from align.pipeline.fitted_batches import fitting_tokens, lighter, note_fitting, planned_tokens
from align.schemas.config import Config, LoraOptions, TrainOptions
from align.schemas.errors import CorruptionError
from align.stages.model.policy import Policy
from support.command import align


def test_a_size_that_did_not_fit_is_not_tried_again(prepared_run):
    assert fitting_tokens(prepared_run, 16_384) == 16_384
    note_fitting(prepared_run, 16_384, 8000)
    note_fitting(prepared_run, 16_384, 4000)  # it ran out again
    assert fitting_tokens(prepared_run, 16_384) == 4000


def test_whoever_asks_for_another_size_gets_it(prepared_run):
    note_fitting(prepared_run, 16_384, 4000)
    assert fitting_tokens(prepared_run, 12_000) == 12_000


def test_a_damaged_note_is_named(prepared_run):
    prepared_run.fitted.write_text("{")
    with pytest.raises(CorruptionError, match=r"fitted\.json"):
        fitting_tokens(prepared_run, 16_384)


def test_what_is_asked_for_is_planned():
    assert planned_tokens(TrainOptions(), "cuda") == 16_384
    assert planned_tokens(TrainOptions(tokens_per_batch=77), "cuda") == 77


def test_only_what_is_not_in_use_is_advised():
    plain = list(lighter(Config(), 1, 1))
    assert plain[0] == "--set train.gradient_checkpointing=true"
    anew = "in a new run, with another --output, "
    assert plain[1:3] == [
        f"{anew}--deepspeed zero3-offload",
        f"{anew}LoRA (--set lora.enabled=true)",
    ]
    assert "--deepspeed zero3" in lighter(Config(), 1, 2)
    train = TrainOptions(
        gradient_checkpointing=True, checkpoint_offload=True, deepspeed="zero3-offload"
    )
    every = Config(train=train, lora=LoraOptions(enabled=True, quantize="nf4"))
    assert list(lighter(every, 3, 1)) == [f"{anew}a cache with a shorter tokens.max_length"]
    assert "--set train.sequence_parallel=8" in lighter(Config(), 1, 8)


def test_a_resumed_run_begins_with_what_fits(training_world, tmp_path, monkeypatch):
    forward, sizes = Policy.forward, []

    def scarce(policy, trees):
        tokens = sum(tree.num_tokens for tree in trees)
        sizes.append(tokens)
        if tokens > 370:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(policy, trees)

    monkeypatch.setattr(Policy, "forward", scarce)
    words = ("--cache", training_world.pairs, "--output", tmp_path / "run", "--method", "dpo")
    sized = ("--tokens-per-batch", 100_000, "--batch-size", 8, "--no-mlflow")
    first = align("train", *words, *sized, "--max-steps", 2, "--set", "train.max_time=1h")
    assert first.code == 0, first
    assert first.err.count("step 1: memory ran out") == 1
    (fits,) = set(re.findall(r"at most ([0-9,]+) tokens per batch", first.err))
    report = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["memory/ran_out"] for line in report] == [1.0, 1.0]

    sizes.clear()
    (tmp_path / "run" / "model").rename(tmp_path / "taken-away")
    again = align("train", *words, *sized, "--max-steps", 2, "--resume", "auto")
    assert f"memory ran out here before with 100,000 tokens per batch: {fits} are used" in again.err
    assert max(sizes, default=0) <= 370
