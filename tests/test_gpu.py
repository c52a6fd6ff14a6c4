"""Both stages on a GPU beside the same two on the CPU: `make test-gpu`, where there is one."""

import json
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.linalg import norm
from safetensors.torch import load_file

from align.schemas.rows import allowed_gaps
from support.command import launch

pytestmark = pytest.mark.gpu

METHODS = ("kto", "dpo", "orpo")
LEARNING = ("--batch-size", 8, "--max-steps", 5, "--lr", 1e-3, "--set", "train.warmup=0")
# AdamW divides by the size of a gradient: of one near 0 it would magnify the rounding error.
STEADY = ("--set", "train.epsilon=1e-6")
WITHOUT_GPU = ("env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-m", "align")
# How far losses, and what five such steps changed, may be from the CPU's in float32: as a share.
LOSS = {"float32": 1e-4, "bfloat16": 1e-2}
CHANGE = {"float32": 1e-2, "bfloat16": 0.2}


def rows_in(folder):
    """Of the cache, by the id of the row."""
    rows = pq.read_table(folder / "cache" / "data").to_pylist()
    return {row["row_id"]: row for row in rows}


def losses_in(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def weights_in(model):
    """Every weight of a model in one row."""
    tensors = load_file(model / "model.safetensors")
    return np.concatenate([tensors[name].float().numpy().ravel() for name in sorted(tensors)])


def both_stages(world, folder, device, dtype):
    """Runs stage 1, and stage 2 by each method, from the command line."""
    program = WITHOUT_GPU if device == "cpu" else WITHOUT_GPU[2:]

    def give(*command):
        how = ("--set", f"model.device={device}", "--no-mlflow")
        answer = launch(*command, *how, cwd=folder, program=program)
        assert answer.code == 0, answer

    scored = ("--model", world.model, "--dtype", dtype, "--output", "cache")
    give("precompute-ref", world.data.paired, *scored)
    for method in METHODS:
        learned = ("--method", method, "--cache", "cache", "--output", method)
        give("train", *learned, *LEARNING, *STEADY, "--set", f"train.dtype={dtype}")
    return folder


@pytest.fixture(scope="module")
def on_cpu(device, world, tmp_path_factory):
    return both_stages(world, tmp_path_factory.mktemp("on-cpu"), "cpu", "float32")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def on_device(device, dtype, world, tmp_path_factory):
    return both_stages(world, tmp_path_factory.mktemp("on-device"), device, dtype)


def test_a_gpu_scores_every_branch_as_the_cpu_does(device, dtype, on_cpu, on_device):
    told = json.loads((on_device / "cache" / "manifest.json").read_text())["fingerprint"]
    assert (told["model.device"], told["model.dtype"]) == (device, dtype)
    found, expected = rows_in(on_device), rows_in(on_cpu)
    assert len(found) == 60
    assert found.keys() == expected.keys()
    for row_id, row in found.items():
        assert row["completion_ids"] == expected[row_id]["completion_ids"]
        gaps = np.abs(np.subtract(row["ref_logp"], expected[row_id]["ref_logp"]))
        assert (gaps <= allowed_gaps(np.array(row["num_tokens"]), "float32", dtype)).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_learns_what_the_cpu_learns(dtype, on_cpu, on_device, world, method):
    losses = losses_in(on_cpu / method)
    assert len(losses) == 5
    assert losses_in(on_device / method) == pytest.approx(losses, rel=LOSS[dtype])
    before, expected, found = (
        weights_in(folder)
        for folder in (world.model, on_cpu / method / "model", on_device / method / "model")
    )
    assert norm(found - expected) < CHANGE[dtype] * norm(expected - before)
