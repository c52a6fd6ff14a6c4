"""What a damaged, foreign or hostile state does: it is refused, and nothing of it is run."""

import os
from dataclasses import replace

import pytest
import torch

from align.schemas.errors import CorruptionError, UsageError
from align.stages.engine.deepspeed_engine import open_engine
from support.engine_ranks import OPTIONS, WIDTH, Run
from support.tiny_policy import TinyPolicy

FILES = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]


@pytest.fixture
def engine_run(one_rank):
    return Run(one_rank, replace(OPTIONS, deepspeed="zero1", dtype="float32"))


@pytest.fixture
def state(engine_run, tmp_path):
    engine_run.engine.save_state(tmp_path)
    return tmp_path / "state"


class Hostile:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_damaged_or_hostile_state_is_refused_and_not_run(one_rank, state, tmp_path, stage):
    """Under the stage that saved it, and where it is cut for another one."""
    run = Run(one_rank, replace(OPTIONS, deepspeed=f"zero{stage}", dtype="float32"))
    for path in (state / name for name in FILES):
        whole = path.read_bytes()
        content = torch.load(path, weights_only=False)
        torch.save(content | {"extra": Hostile(f"touch {tmp_path}/ran")}, path)
        for damaged in (path.read_bytes(), b"", whole[:-200], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(CorruptionError, match="does not fit the model and engine"):
                run.engine.load_state(tmp_path)
        path.write_bytes(whole)
    assert not (tmp_path / "ran").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    run.engine.load_state(tmp_path)


def test_no_state_is_refused(engine_run, tmp_path):
    with pytest.raises(CorruptionError):
        engine_run.engine.load_state(tmp_path)


@pytest.mark.parametrize("stage", range(4))
def test_the_state_of_another_policy_is_refused(one_rank, state, tmp_path, stage):
    options = replace(OPTIONS, deepspeed=f"zero{stage}", dtype="float32")
    other = Run(one_rank, options, frozen=True)
    with pytest.raises(CorruptionError):
        other.engine.load_state(tmp_path)


def test_a_policy_with_nothing_to_learn_is_refused(one_rank):
    policy = TinyPolicy().requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that learns"):
        open_engine(policy, OPTIONS, one_rank, hidden_size=WIDTH)


def test_what_deepspeed_refuses_is_reported_with_the_file_that_asked_for_it(one_rank, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": "perhaps"}}')
    with pytest.raises(UsageError, match=r"DeepSpeed refuses train.deepspeed=.*ds\.json"):
        open_engine(
            TinyPolicy(), replace(OPTIONS, deepspeed=str(path)), one_rank, hidden_size=WIDTH
        )
