import os

import pytest
import torch

from align.schemas.batches import World
from align.schemas.errors import UsageError
from align.stages.engine.distributed import joined_world
from align.stages.engine.launchers import first_host, launcher_environment, world_of
from support.programs import run_program

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[03-05,09]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


def test_a_process_without_a_launcher_is_a_world_of_its_own():
    assert world_of(launcher_environment({})) == World(rank=0, size=1, local_rank=0)


def test_torchrun_and_the_deepspeed_launcher_say_who_we_are():
    assert world_of(launcher_environment(TORCHRUN)) == World(rank=5, size=8, local_rank=1)


def test_srun_says_who_we_are_and_all_ranks_meet_at_the_first_node():
    environment = launcher_environment(SRUN)
    assert world_of(environment) == World(rank=5, size=8, local_rank=1)
    assert environment["MASTER_ADDR"] == "gpu03"
    assert environment == launcher_environment(SRUN | {"SLURM_PROCID": "0"}) | {"RANK": "5"}
    next_step = launcher_environment(SRUN | {"SLURM_STEP_ID": "1"})
    assert next_step["MASTER_PORT"] != environment["MASTER_PORT"]


def test_a_batch_script_that_calls_us_without_srun_runs_alone():
    batch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert world_of(launcher_environment(batch | {"SLURM_NTASKS": "8"})).size == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu01", "gpu01"),
        ("gpu01,gpu02", "gpu01"),
        ("gpu[03-05,09],login1", "gpu03"),
        ("a[1-2]b[07,08],c", "a1b07"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK not set"),
        ({"RANK": "8"}, "are not a rank below WORLD_SIZE"),
        ({"RANK": "-1"}, "are not a rank below WORLD_SIZE"),
        ({"WORLD_SIZE": "many"}, "are not a rank below WORLD_SIZE"),
        ({"MASTER_PORT": "0"}, "torchrun --standalone"),
    ],
)
def test_a_launch_that_cannot_come_together_is_refused_at_once(change, message):
    environment = {name: value for name, value in (TORCHRUN | change).items() if value}
    with pytest.raises(UsageError, match=message):
        world_of(launcher_environment(environment))


def test_a_world_can_be_joined_repeatedly_and_does_not_change_the_environment():
    before = dict(os.environ)
    for _ in range(2):
        with joined_world() as world:
            assert (world.size, torch.distributed.get_world_size()) == (1, 1)
            assert os.environ["LOCAL_RANK"] == "0"
        assert not torch.distributed.is_initialized()
    assert dict(os.environ) == before


def test_a_silent_rank_is_noticed_and_a_slow_or_stopped_one_is_not():
    """No connection is closed: without a heartbeat the other one waits for a day."""
    done = run_program("silent_rank")
    assert done.stdout.splitlines() == [
        *["slow ranks are waited for"] * 2,
        *["stopped ranks go on"] * 2,
        "the first rank ended with 69",
    ]
    assert "Rank 0 has not heard from rank 1" in done.stderr
    assert "--resume auto" in done.stderr
