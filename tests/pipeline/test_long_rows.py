"""Rows of tens of thousands of tokens: what they take in memory, and both stages over one."""

import json
import math
import random

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from align.stages.demo.tiny_world import ModelShape, make_model
from align.stages.model.fused_head_backward import BUFFER_BYTES
from support.programs import run_program

SHAPE = ModelShape(hidden_size=16, layers=1, heads=2, key_value_heads=1, intermediate_size=16)
LENGTHS = (4096, 8192, 16_384)
KINDS = ("full, score", "full, learn", "window, score", "window, learn")


@pytest.fixture(scope="module")
def costs():
    answer = run_program("long_rows", *LENGTHS)
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_larger_than_the_buffer_of_the_head(costs, kind):
    """A mask of 16k tokens would be 256 M elements, and their logits as many."""
    most = BUFFER_BYTES // 4
    assert [elements for _, elements in costs[kind]] <= [most] * len(LENGTHS), costs


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_more_costs_its_activations_only(costs, kind):
    """Under 3 KiB: a score of states 16 wide, forward and backward."""
    shortest, *_, longest = (mib for mib, _ in costs[kind])
    assert longest - shortest < 3 * (LENGTHS[-1] - LENGTHS[0]) / 1024, costs
    assert longest < 256, costs  # the buffer of the head, the mask, and those activations


@pytest.mark.long
def test_a_row_of_thirty_two_thousand_tokens_goes_through_both_stages(server, world, tmp_path):
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    make_model(model, AutoTokenizer.from_pretrained(world.tokenizer), shape=SHAPE, pretrain_steps=0)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40_000}))
    words = random.Random(0)
    prompt, chosen = (" ".join(words.choices(["red", "blue", "one"], k=16_500)) for _ in "12")
    row = {"prompt": prompt, "chosen": chosen, "rejected": "no"}
    data.write_text(f"{json.dumps(row)}\n")

    tokens = ("--set", "tokens.max_length=40000", "--set", "tracking.mlflow=false")
    made = server.run("precompute-ref", data, "--model", model, "--output", tmp_path / "cache",
                      "--kl-pairs", 0, *tokens)  # fmt: skip
    assert made.code == 0, made.err
    trained = server.run("train", "--method", "dpo", "--cache", tmp_path / "cache",
                         "--output", tmp_path / "run", *tokens)  # fmt: skip
    assert trained.code == 0, trained.err
    (shard,) = (tmp_path / "cache").rglob("*.parquet")
    (stored,) = pq.read_table(shard, columns=["prompt_tokens", "num_tokens"]).to_pylist()
    assert stored["prompt_tokens"] + stored["num_tokens"][0] > 32_768
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(math.log(2), abs=1e-6)  # it begins as the reference
