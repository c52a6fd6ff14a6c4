"""A run under ZeRO-3 whose policy is spread over the ranks as it is created."""

import pytest

from align.pipeline.train import run_training
from align.stages.model import sharded_load
from align.stages.storage.run_folder import RunFolder
from support.stage_one import Silent
from support.training_world import job_of

LEARNING = {"deepspeed": "zero3", "warmup": 0.0, "schedule": "constant", "save_every": 2}


@pytest.fixture
def elements(monkeypatch):
    """How many elements of stored tensors each load has read."""
    counts, read = [], sharded_load._read

    def counted(tensor, first, into):
        counts[-1] += len(into)
        read(tensor, first, into)

    def begun(*arguments, load=sharded_load._spread, **how):
        counts.append(0)
        return load(*arguments, **how)

    monkeypatch.setattr(sharded_load, "_read", counted)
    monkeypatch.setattr(sharded_load, "_spread", begun)
    return counts


def train(training_world, folder, **settings):
    job = job_of(training_world.pairs, "dpo", output=str(folder), **(LEARNING | settings))
    run_training(job, progress=Silent())
    return (folder / "model" / "model.safetensors").read_bytes()


def test_a_run_that_goes_on_reads_no_weights_but_its_checkpoint(training_world, tmp_path, elements):
    straight = train(training_world, tmp_path / "straight", max_steps=4)
    first = train(training_world, tmp_path / "run", max_steps=2)
    assert RunFolder(tmp_path / "run").latest_step() == 2
    resumed = train(training_world, tmp_path / "run", max_steps=4, resume="auto")
    assert resumed == straight != first
    # The third begins with a checkpoint of every parameter, and the model stores no buffers.
    assert elements[0] == elements[1] > 0 == elements[2]
