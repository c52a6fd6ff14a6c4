"""What a damaged, foreign or hostile state does: it is refused, and nothing of it is run."""

import io
import os
import zipfile
from dataclasses import replace

import pytest
import torch

from align.schemas.errors import CorruptionError, UsageError
from align.stages.engine.deepspeed_engine import open_engine
from support.engine_ranks import OPTIONS, WIDTH, Run
from support.tiny_policy import TinyPolicy

FILES = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]


def run_of(world, stage, **how):
    return Run(world, replace(OPTIONS, deepspeed=f"zero{stage}", dtype="float32"), **how)


class Hostile:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_damaged_foreign_or_hostile_state_is_refused_and_not_run(one_rank, tmp_path):
    """Under the stage that saved it, and where it is cut for another one."""
    runs = [run_of(one_rank, stage) for stage in (1, 3)]
    with pytest.raises(CorruptionError):
        runs[0].engine.load_state(tmp_path)  # there is none
    runs[0].engine.save_state(tmp_path)
    for path in (tmp_path / "state" / name for name in FILES):
        whole = path.read_bytes()
        content = torch.load(path, weights_only=False)
        torch.save(content | {"extra": Hostile(f"touch {tmp_path}/ran")}, path)
        for damaged in (path.read_bytes(), b"", whole[:-200], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            for run in runs:
                with pytest.raises(CorruptionError, match="does not fit the model and engine"):
                    run.engine.load_state(tmp_path)
        path.write_bytes(whole)
    assert not (tmp_path / "ran").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    for stage in range(4):
        with pytest.raises(CorruptionError):
            run_of(one_rank, stage, frozen=True).engine.load_state(tmp_path)
    for run in runs:
        run.engine.load_state(tmp_path)


def test_a_policy_with_nothing_to_learn_is_refused(one_rank):
    policy = TinyPolicy().requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that learns"):
        open_engine(policy, OPTIONS, one_rank, hidden_size=WIDTH)


def test_what_deepspeed_refuses_is_reported_with_the_file_that_asked_for_it(one_rank, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": "perhaps"}}')
    with pytest.raises(UsageError, match=r"DeepSpeed refuses train.deepspeed=.*ds\.json"):
        Run(one_rank, replace(OPTIONS, deepspeed=str(path), dtype="float32"))


def flat(content):
    """The state of the optimizer of a file, and the state of its first flat tensor."""
    optimizer = content["optimizer_state_dict"]
    base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    return optimizer, base, base["state"][0]


def weights_of(optimizer):
    return next(optimizer[key] for key in optimizer if key.endswith(("fp32_groups", "flat_groups")))


def other_weights(change):
    def edit(content):
        weights = weights_of(flat(content)[0])
        weights[0] = change(weights[0])

    return edit


# What DeepSpeed would repeat, pad or pass over, and what torch's optimizer fails at later.
OTHERS = {
    "one weight": other_weights(lambda weights: weights[:1].clone()),
    "weights for half": other_weights(lambda weights: weights[: len(weights) // 2].clone()),
    "a weight that is no number": other_weights(lambda weights: weights * float("nan")),
    "a short moment": lambda content: flat(content)[2].update(exp_avg=torch.ones(3)),
    "no moment": lambda content: flat(content)[2].pop("exp_avg_sq"),
    "steps below zero": lambda content: flat(content)[2].update(step=torch.tensor(-1.0)),
    "no scale of the loss": lambda content: flat(content)[0].update(loss_scaler=True),
    "no moments": lambda content: flat(content)[1]["state"].clear(),
    "another norm": lambda content: flat(content)[0].update(clip_grad=9.0),
    "no betas": lambda content: flat(content)[1]["param_groups"][0].pop("betas"),
    "another decay": lambda content: flat(content)[1]["param_groups"][0].update(weight_decay=9.0),
}


OF_THE_SAME = {"no scale of the loss", "another norm"}  # not read for an engine of another stage


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_that_no_run_has_written_is_refused(one_rank, tmp_path, stage):
    run = run_of(one_rank, stage).steps(0, 2)
    run.engine.save_state(tmp_path)
    (path,) = (tmp_path / "state").glob("*_optim_states.pt")
    whole = path.read_bytes()
    same, other = run_of(one_rank, stage), run_of(one_rank, 0)
    for name, damage in OTHERS.items():
        content = torch.load(path, weights_only=False)
        damage(content)
        torch.save(content, path)
        for resumed in (same,) if name in OF_THE_SAME else (same, other):
            with pytest.raises(CorruptionError, match="does not fit the model and engine"):
                resumed.engine.load_state(tmp_path)
        path.write_bytes(whole)
    model = (
        tmp_path / "state" / FILES[0] if stage < 3 else min(path.parent.glob("*model_states.pt"))
    )
    kept = model.read_bytes()
    content = torch.load(model, weights_only=False)
    content["module"]["model.hidden.bias"] = torch.zeros(1).expand(10**12)
    torch.save(content, model)
    with pytest.raises(CorruptionError, match="more values than are stored"):
        same.engine.load_state(tmp_path)
    model.write_bytes(kept)
    with zipfile.ZipFile(io.BytesIO(whole)) as stored:
        content = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, member in content.items():
            packed.writestr(name, member + bytes(1 << 20))
    with pytest.raises(CorruptionError, match="holds more than its size"):
        same.engine.load_state(tmp_path)
    path.write_bytes(whole)
    for resumed in (same, other):
        resumed.engine.load_state(tmp_path)
    assert same.steps(2, 4).weights() == run.steps(2, 4).weights()
