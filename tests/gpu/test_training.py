"""What a GPU computes and resumes, beside a CPU: `make test-gpu`.

With `--device cpu` the tests of this folder that compare numbers are tried out on a CPU.
"""

import json
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.linalg import norm
from safetensors.torch import load_file

from align.schemas.config import ModelOptions
from align.schemas.rows import allowed_gaps
from align.schemas.train_options import LoraOptions
from align.stages.model.policy import load_policy
from support.command import launch
from support.engine_ranks import OPTIONS, Run, global_tokens, rows_of
from support.stage_one import contents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # the compiler has advice for other programs
]

# AdamW divides by the size of a gradient: of one near 0 it would magnify the rounding error.
STEADY = replace(OPTIONS, epsilon=1e-4, dtype="float32")
PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")
PLAIN = LoraOptions()


def policy_of(folder, options, lora=PLAIN, device="auto"):
    return load_policy(ModelOptions(path=str(folder), device=device), options, lora)


def run_of(world, folder, options, lora=PLAIN):
    return Run(world, options, policy=policy_of(folder, options, lora))


@pytest.fixture(scope="module")
def torch_steps(world):
    """The weights before and after three steps of torch's own AdamW on a CPU."""
    policy = policy_of(world.model, STEADY, device="cpu")
    before = {name: one.detach().clone() for name, one in policy.model.named_parameters()}
    decayed = [one for one in policy.parameters() if one.ndim > 1]
    others = [one for one in policy.parameters() if one.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    betas = (STEADY.beta1, STEADY.beta2)
    optimizer = torch.optim.AdamW(
        groups, betas=betas, eps=STEADY.epsilon, weight_decay=STEADY.weight_decay
    )
    for step, lr in ((3, 5e-3), (4, 2e-3), (5, 1e-3)):
        rows = rows_of(step)
        (-policy(rows)[0].double().sum() / global_tokens(rows)).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), STEADY.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return before, dict(policy.model.named_parameters())


def moved(found, before):
    """The distance of all weights from those before."""
    pairs = ((found[name][1], one) for name, one in before.items())
    parts = [(torch.tensor(values) - one.detach().cpu()).norm() for values, one in pairs]
    return torch.stack(parts).norm().item()


def base_optimizer(run):
    outer = run.engine._engine.optimizer
    return getattr(outer, "optimizer", outer)


@pytest.mark.parametrize("preset", PRESETS)
def test_adamw_is_the_fastest_there_is_and_takes_the_steps_of_the_cpus(
    device, lone_rank, world, torch_steps, preset
):
    run = run_of(lone_rank, world.model, replace(STEADY, deepspeed=preset)).steps(3, 6)
    optimizer = base_optimizer(run)
    if device == "cuda":
        on_host = preset.endswith("offload")
        assert type(optimizer).__name__ == ("DeepSpeedCPUAdam" if on_host else "AdamW")
        assert on_host or all(group["fused"] for group in optimizer.param_groups)
    before, after = torch_steps
    assert moved(run.weights(), after) < 0.02 * moved(run.weights(), before)


@pytest.mark.parametrize(
    ("name", "preset", "dtype"),
    [
        *(("adamw", preset, "float32") for preset in PRESETS),
        *(("adamw", preset, "bfloat16") for preset in ("zero1", "zero3", "zero2-offload")),
        *(("adamw8bit", "zero1", "bfloat16"), ("adamw8bit", "zero3", "bfloat16")),
    ],
)
def test_a_run_resumes_bit_for_bit(lone_rank, world, tmp_path, name, preset, dtype):
    options = replace(STEADY, optimizer=name, deepspeed=preset, dtype=dtype)
    straight = run_of(lone_rank, world.model, options).steps(0, 6)
    first = run_of(lone_rank, world.model, options).steps(0, 3)
    (tmp_path / "state").mkdir()
    first.engine.save_state(tmp_path / "state")
    second = run_of(lone_rank, world.model, options)
    second.step(4)
    second.engine.load_state(tmp_path / "state")
    assert second.steps(3, 6).weights() == straight.weights()
    assert all(applied for applied, _ in straight.updates)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2"])
def test_four_bits_learn_and_stay_what_they_are(device, lone_rank, world, preset, dtype):
    options = replace(STEADY, deepspeed=preset, dtype=dtype)
    lora = LoraOptions(enabled=True, quantize="nf4")
    run = run_of(lone_rank, world.model, options, lora)
    module = run.engine._engine.module
    before = {name: one.detach().clone() for name, one in module.named_parameters()}
    run.steps(3, 6)
    assert all(applied for applied, _ in run.updates)
    after = dict(module.named_parameters())
    changed = {name for name, one in after.items() if not torch.equal(one, before[name])}
    assert {name for name in before if "lora_B" in name} <= changed
    assert all("lora_" in name for name in changed)
    packed = [one for one in after.values() if one.dtype == torch.uint8]
    assert len(packed) == sum("_proj.base_layer.weight" in name for name in before)
    assert {one.device.type for one in after.values()} == {device}


METHODS = ("kto", "dpo", "orpo")
LEARNING = ("--batch-size", 8, "--max-steps", 5, "--lr", 1e-3, "--set", "train.warmup=0")
# AdamW divides by the size of a gradient: of one near 0 it would magnify the rounding error.
LESS_STEEP = ("--set", "train.epsilon=1e-6")
WITHOUT_GPU = ("env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-m", "align")
# How far losses, and what five such steps changed, may be from the CPU's in float32: as a share.
LOSS = {"float32": 1e-4, "bfloat16": 1e-2}
CHANGE = {"float32": 1e-2, "bfloat16": 0.2}


def rows_in(folder):
    """The rows of the cache by their ids."""
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
        give("train", *learned, *LEARNING, *LESS_STEEP, "--set", f"train.dtype={dtype}")
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


def test_a_gpu_scores_every_completion_as_the_cpu_does(device, dtype, on_cpu, on_device):
    stored = json.loads((on_device / "cache" / "manifest.json").read_text())["fingerprint"]
    assert (stored["model.device"], stored["model.dtype"]) == (device, dtype)
    found, expected = rows_in(on_device), rows_in(on_cpu)
    assert len(found) == 60
    assert found.keys() == expected.keys()
    for row_id, row in found.items():
        assert row["completion_ids"] == expected[row_id]["completion_ids"]
        gaps = np.abs(np.subtract(row["ref_logp"], expected[row_id]["ref_logp"]))
        assert (gaps <= allowed_gaps(np.array(row["num_tokens"]), "float32", dtype)).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_learns_what_the_cpu_learns(dtype, on_cpu, on_device, world, method):
    assert len(losses_in(on_cpu / method)) == 5
    require_learned(world, on_device / method, on_cpu / method, dtype)


def require_learned(world, run, other, dtype):
    """Requires losses, and what was learned, to be those of another run."""
    assert losses_in(run) == pytest.approx(losses_in(other), rel=LOSS[dtype])
    folders = (world.model, other / "model", run / "model")
    before, expected, found = map(weights_in, folders)
    assert norm(found - expected) < CHANGE[dtype] * norm(expected - before)


ALONE = (sys.executable, "-m", "align")


def of_ranks(ranks):
    """The program that starts this many ranks, each on a GPU of its own."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return (*ALONE[:2], *launcher, *ALONE[1:])


# The same cache in every way.
SCORED = {"ranks": ((), of_ranks(2)), "ray": (("--executor", "ray"), ALONE)}


@pytest.fixture
def give(device, several, tmp_path):
    """Gives a command to several ranks, or to Ray, in a folder of its own."""

    def given(*command, program):
        how = ("--set", f"model.device={device}", "--no-mlflow")
        answer = launch(*command, *how, cwd=tmp_path, program=program)
        assert answer.code == 0, answer
        return tmp_path

    return given


@pytest.mark.parametrize("way", SCORED)
def test_several_gpus_make_the_cache_of_one(give, dtype, on_device, world, way):
    more, program = SCORED[way]
    scored = ("--model", world.model, "--dtype", dtype, "--output", "cache")
    anew = ("--set", "cache.reuse_known=false")
    folder = give("precompute-ref", world.data.paired, *scored, *anew, *more, program=program)
    assert contents(folder / "cache") == contents(on_device / "cache")


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_several_gpus_learn_what_one_learns(give, dtype, on_device, world, stage):
    learned = ("--method", "dpo", "--cache", on_device / "cache", "--output", "dpo")
    how = (*LEARNING, *LESS_STEEP, "--set", f"train.dtype={dtype}", "--deepspeed", stage)
    folder = give("train", *learned, *how, program=of_ranks(2))
    require_learned(world, folder / "dpo", on_device / "dpo", dtype)
