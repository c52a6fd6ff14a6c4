import os

import pytest
import torch

from align.schemas.batches import World
from align.schemas.errors import UsageError
from align.stages.engine.distributed import joined_world
from align.stages.engine.launchers import first_host, launcher_environment, world_of
from support.refusals import refuses

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


def test_each_launcher_says_who_we_are():
    assert world_of(launcher_environment({})) == World(rank=0, size=1, local_rank=0)
    fifth = World(rank=5, size=8, local_rank=1)
    assert world_of(launcher_environment(TORCHRUN)) == fifth
    assert world_of(launcher_environment(SRUN)) == fifth
    # A batch script that calls us without srun has no step.
    batch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert world_of(launcher_environment(batch | {"SLURM_NTASKS": "8"})).size == 1


def test_all_tasks_of_srun_meet_at_its_first_node_and_those_of_another_step_elsewhere():
    environment = launcher_environment(SRUN)
    assert environment["MASTER_ADDR"] == "gpu03"
    assert environment == launcher_environment(SRUN | {"SLURM_PROCID": "0"}) | {"RANK": "5"}
    next_step = launcher_environment(SRUN | {"SLURM_STEP_ID": "1"})
    assert next_step["MASTER_PORT"] != environment["MASTER_PORT"]
    nodes = {"gpu01,gpu02": "gpu01", "gpu[03-05,09],login1": "gpu03", "a[1-2]b[07,08],c": "a1b07"}
    assert {names: first_host(names) for names in nodes} == nodes


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, ("MASTER_ADDR", "MASTER_PORT")),
        ({"LOCAL_RANK": None}, ("LOCAL_RANK",)),
        ({"RANK": "8"}, ("RANK=8", "WORLD_SIZE=8")),
        ({"WORLD_SIZE": "many"}, ("WORLD_SIZE=many",)),
        ({"MASTER_PORT": "0"}, ("MASTER_PORT", "--standalone")),
    ],
)
def test_a_launch_that_cannot_come_together_is_refused_at_once(change, names):
    environment = {name: value for name, value in (TORCHRUN | change).items() if value}
    with refuses(UsageError, *names):
        world_of(launcher_environment(environment))


def test_a_world_can_be_joined_repeatedly_and_does_not_change_the_environment():
    before = dict(os.environ)
    for _ in range(2):
        with joined_world() as world:
            assert (world.size, torch.distributed.get_world_size()) == (1, 1)
            assert os.environ["LOCAL_RANK"] == "0"
        assert not torch.distributed.is_initialized()
    assert dict(os.environ) == before
