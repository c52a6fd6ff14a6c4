"""What a damaged, foreign or hostile state does: it is refused, and nothing of it is run."""

import os
from dataclasses import replace

import pytest
import torch

from align.schemas.errors import CorruptionError, UsageError
from align.stages.engine.deepspeed_engine import open_engine
from support.engine_ranks import OPTIONS, WIDTH, Run
from support.refusals import refuses
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
    run = run_of(one_rank, 1)
    with pytest.raises(CorruptionError):
        run.engine.load_state(tmp_path)  # there is none
    run.engine.save_state(tmp_path)
    for path in (tmp_path / "state" / name for name in FILES):
        whole = path.read_bytes()
        content = torch.load(path, weights_only=False)
        torch.save(content | {"extra": Hostile(f"touch {tmp_path}/ran")}, path)
        for damaged in (path.read_bytes(), b"", whole[:-200], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(CorruptionError):
                run.engine.load_state(tmp_path)
        path.write_bytes(whole)
    assert not (tmp_path / "ran").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    for other in (run_of(one_rank, 1, frozen=True), run_of(one_rank, 0), run_of(one_rank, 3)):
        with pytest.raises(CorruptionError):
            other.engine.load_state(tmp_path)
    run.engine.load_state(tmp_path)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_of_more_or_fewer_parameters_is_refused_without_zero_too(
    one_rank, tmp_path, frozen
):
    run = run_of(one_rank, 0, frozen=frozen)
    run.engine.save_state(tmp_path)
    with refuses(CorruptionError, tmp_path):
        run_of(one_rank, 0, frozen=not frozen).engine.load_state(tmp_path)
    run_of(one_rank, 0, frozen=frozen).engine.load_state(tmp_path)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_has_no_frozen_weight_under_any_name(one_rank, tmp_path, stage, frozen):
    """The embedding is also the head."""
    run = run_of(one_rank, stage, frozen=frozen).steps(0, 1)
    run.engine.save_state(tmp_path)
    (path,) = (tmp_path / "state").glob("*model_states.pt")
    embedding = set() if frozen else {"embed.weight", "head.weight"}
    learned = {"hidden.weight", "hidden.bias", "head.bias", "scale", *embedding}
    assert {*torch.load(path)["module"]} == {f"model.{name}" for name in learned}

    resumed = run_of(one_rank, stage, frozen=frozen)
    resumed.engine.load_state(tmp_path)
    assert resumed.steps(1, 3).weights() == run.steps(1, 3).weights()


def test_a_policy_with_nothing_to_learn_is_refused(one_rank):
    policy = TinyPolicy().requires_grad_(False)
    with refuses(UsageError, "lora.targets"):
        open_engine(policy, OPTIONS, one_rank, hidden_size=WIDTH)


def test_what_deepspeed_refuses_is_reported_with_the_file_that_asked_for_it(one_rank, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": "perhaps"}}')
    with refuses(UsageError, "train.deepspeed", path):
        Run(one_rank, replace(OPTIONS, deepspeed=str(path), dtype="float32"))
