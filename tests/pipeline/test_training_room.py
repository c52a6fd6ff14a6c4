"""Room on the disk is looked at before it is needed."""

import json
import logging

import pytest

from align.pipeline import checkpointer
from align.schemas.errors import StorageError
from align.stages.engine.distributed import joined_world
from align.stages.storage import fs
from align.stages.storage.checkpoints import read_checkpoint
from support.programs import may_mount
from support.training_world import job_of, learn, session_of


@pytest.mark.parametrize(
    ("dtype", "deepspeed"), [("float32", "zero0"), ("bfloat16", "zero1"), ("float32", "zero2")]
)
def test_what_a_first_checkpoint_needs_is_known_before_it_is_there(
    training_world, prepared_run, dtype, deepspeed
):
    """Nearly: beside the numbers there are some names, which are much in so small a model."""
    job = job_of(training_world.pairs, "dpo", dtype=dtype, deepspeed=deepspeed, max_steps=1)
    with joined_world() as world:
        session, _ = learn(job, world)  # the moments are made in the first step
        expected = checkpointer.checkpoint_bytes(session, prepared_run)
        session.engine.save_state(prepared_run.draft(0, "run"))
    written = sum(path.stat().st_size for path in prepared_run.root.rglob("*") if path.is_file())
    assert 0.7 * written < expected <= written


def test_too_little_room_is_refused_and_scarce_room_is_reported(
    training_world, prepared_run, monkeypatch, caplog
):
    with joined_world() as world:
        session = session_of(job_of(training_world.pairs, "dpo"), world)
        checkpoint, model = (
            checkpointer.checkpoint_bytes(session, prepared_run),
            checkpointer.model_bytes(session),
        )
        assert checkpoint == 3 * model  # a weight and its two moments

        def with_free(free):
            monkeypatch.setattr(fs, "free_bytes", lambda _: free)
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="align"):
                checkpointer.require_room(session, prepared_run)
            return caplog.text

        # Two are kept by default, and a third is whole before the first is removed.
        assert with_free(3 * checkpoint + model) == ""
        assert "3 checkpoints (train.keep_last, and one that" in with_free(3 * checkpoint)
        with pytest.raises(StorageError, match=r"a checkpoint needs about .* Free some space"):
            with_free(checkpoint + model - 1)
        assert checkpointer.lack_of_room(session, prepared_run) == ""
        monkeypatch.setattr(fs, "free_bytes", lambda _: model - 1)
        with pytest.raises(StorageError, match=r"model: about .* the checkpoint is kept"):
            checkpointer.require_room_for_model(session, prepared_run)


@pytest.mark.skipif(not may_mount(), reason="needs user namespaces")
def test_a_checkpoint_without_room_costs_only_itself(course, tmp_path):
    """The disk has room for the model and one checkpoint and a quarter; then for half of it."""
    whole = course.whole()
    checkpoint = read_checkpoint(whole / "checkpoints" / "step-00000006")
    one = sum(file.bytes for file in checkpoint.files)
    model = sum(path.stat().st_size for path in (whole / "model").iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()

    def train(size, kept):
        limited = {"folder": str(disk), "size": size, "kept": str(tmp_path / kept)}
        (answer,) = course.start(disk / "run", disk=limited).answers()
        return answer, (tmp_path / kept / "run" / "metrics.jsonl").read_text().splitlines()

    done, measured = train(1.25 * one + model, "some room")
    assert done.code == 0, done
    assert "Lower train.keep_last, or free some space" in done.err
    assert "step 4: no checkpoint: " in done.err
    assert "bytes are needed, and " in done.err
    failed = {line["step"] for line in map(json.loads, measured) if "checkpoint_failed" in line}
    assert failed == {4, 6}
    refused, measured = train((one + model) / 2, "no room")
    assert refused.code == 74, refused
    assert "a checkpoint needs about " in refused.err
    assert "Traceback" not in refused.err
    assert not [line for line in measured if '"loss"' in line]
