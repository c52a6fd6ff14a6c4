"""`examples/kto_step.py` and the two commands: one KTO step written out, and the same step made."""

import json
import math
import runpy
import sys

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from align.schemas.rows import Role
from align.stages.demo.tiny_world import make_model
from support.rooms import ROOT
from support.rounding import NATS, UNIT

pytestmark = pytest.mark.numeric

BETA, LR = 0.5, 1e-3
EPSILON = 1e-2  # of AdamW: what rounding leaves of a gradient moves a weight by that / EPSILON
STEP = (
    *("--method", "kto", "--max-steps", 1, "--batch-size", 24, "--lr", LR),
    *("--set", "train.schedule=constant", "--set", "train.warmup=0"),
    *("--set", f"train.epsilon={EPSILON}", "--set", f"method.beta={BETA}"),
    *("--set", "train.other_reference=true", "--no-mlflow"),
)


@pytest.fixture(scope="module")
def both(server, world, tmp_path_factory):
    """The step as the example makes it, and the folder in which the commands have made it."""
    folder = tmp_path_factory.mktemp("step")
    lines = world.data.paired_jsonl.read_text(encoding="utf-8").splitlines()[:24]
    texts = [json.loads(line) for line in lines]
    for text in texts[::2]:
        text["rejected"] = " No."  # a partner of the same text is no mismatch
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, texts)), encoding="utf-8")
    # Another model than the reference: from the reference itself z and the rewards would be 0.
    reference, policy = folder / "reference", folder / "policy"
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    make_model(reference, tokenizer, pretrain_steps=0, seed=0)
    make_model(policy, tokenizer, pretrain_steps=0, seed=1)
    for words in (
        ("precompute-ref", rows, "--model", reference, "--no-mlflow"),
        ("train", "--model", policy, *STEP),
    ):
        answer = server.fork(words, folder, {}).answer()
        assert answer.code == 0, answer
    options = ("--policy", policy, "--steps", 1, "--lr", LR, "--beta", BETA, "--epsilon", EPSILON)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["kto_step.py", *map(str, (reference, rows, *options))])
        example = runpy.run_path(str(ROOT / "examples" / "kto_step.py"))
    return example, folder


def test_its_mismatched_pairs_are_those_of_the_cache(both):
    example, folder = both
    (shard,) = (folder / "align-cache" / "data").iterdir()
    stored = [
        (row["prompt_ids"], ids)
        for row in pq.read_table(shard).to_pylist()
        for ids, role in zip(row["completion_ids"], row["role"], strict=True)
        if role == Role.MISMATCHED
    ]
    assert sorted(stored) == sorted(example["mismatched"])
    # A prompt has several rows, whose order counts, and some partners have been exchanged.
    assert len(stored) == 48
    assert example["longest"] > 2
    assert example["partners"] != [(j + example["longest"]) % 48 for j in range(48)]


def test_its_numbers_and_weights_are_those_of_the_command(both):
    example, folder = both
    (line,) = (folder / "align-run" / "metrics.jsonl").read_text().splitlines()
    found, (expected,) = json.loads(line), example["history"]
    # A log-prob in float32 is right to NATS, so a log-ratio r and the mean z of such to 2 NATS. The
    # slope of a loss in beta (r - z) is 1/4 at most: 4 NATS of error in r - z are beta NATS in it.
    for name, bound in (
        ("kl/raw", 2 * NATS),
        ("kl/clamped", 2 * NATS),
        ("rewards/chosen", BETA * 2 * NATS),
        ("rewards/rejected", BETA * 2 * NATS),
        ("loss", BETA * NATS),
    ):
        assert found[name] == pytest.approx(expected[name], rel=0, abs=bound), name
    assert expected["kl/clamped"] > 0
    assert abs(expected["loss"] - 0.5) > 100 * BETA * NATS  # what it is without any learning

    # A gradient is a sum over the n tokens of the step. Float32 is off by n u of it where its terms
    # add up, and by less where they cancel: n u of the norm, on either side. It is shortened to
    # norm 1. AdamW's first step is lr g / (|g| + epsilon), whose slope in g is at most
    # lr / epsilon; then either side rounds each weight once.
    norm, apart = expected["grad_norm"], 2 * found["tokens"] * UNIT
    assert norm > 1
    assert found["grad_norm"] == pytest.approx(norm, rel=apart)
    before = load_file(folder / "policy" / "model.safetensors")
    after = load_file(folder / "align-run" / "model" / "model.safetensors")
    mine = example["policy"].state_dict()
    assert {*after} == {*before} == {*mine} - {"lm_head.weight"}  # which is the embedding
    bound = LR / EPSILON * apart + 2 * UNIT * norm_of(before)
    assert norm_of({name: mine[name] - after[name] for name in after}) <= bound
    assert norm_of({name: mine[name] - before[name] for name in before}) > 100 * bound


def norm_of(tensors):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))
