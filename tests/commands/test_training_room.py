"""Room on the disk is looked at before it is needed, and what fitted into memory is noted."""

import json
import os
import shutil
import subprocess

import pytest
import torch

from align.pipeline.train import checkpoint
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions
from align.stages.engine.distributed import joined_world
from align.stages.model.policy import Policy
from align.stages.storage.run.checkpoints import read_checkpoint
from align.stages.storage.run.run_folder import RunFolder, read_ending
from support.command import align, success
from support.refusals import require_names
from support.training_world import job_of, learn, session_of


def test_what_a_first_checkpoint_needs_is_known_before_it_is_there(training_world, prepared_run):
    """Nearly: beside the numbers there are some names, which are much in so small a model."""
    kind = {"dtype": "bfloat16", "deepspeed": "zero1", "max_steps": 1}
    job = job_of(training_world.pairs, "dpo", **kind)
    with joined_world() as world:
        session, _ = learn(job, world)  # the moments are made in the first step
        session.folder = prepared_run
        expected = checkpoint.checkpoint_bytes(session)
        session.engine.save_state(prepared_run.draft(0, "run"))
    written = sum(path.stat().st_size for path in prepared_run.root.rglob("*") if path.is_file())
    assert 0.7 * written < expected <= written


def test_room_for_a_model_is_room_for_its_adapter_and_for_what_it_is_merged_into(training_world):
    bytes_of = {}
    for name, lora in {
        "whole": LoraOptions(),
        "adapter": LoraOptions(enabled=True),
        "both": LoraOptions(enabled=True, merge=True),
    }.items():
        with joined_world() as world:
            session = session_of(job_of(training_world.pairs, "dpo", lora=lora), world)
        bytes_of[name] = checkpoint.model_bytes(session)
    assert 0 < bytes_of["adapter"] < bytes_of["whole"]
    assert bytes_of["both"] >= bytes_of["whole"] + bytes_of["adapter"]


def may_mount():
    """Whether a process may have a mount namespace of its own, and a disk in it."""
    command = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if not shutil.which("unshare"):
        return False
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs user namespaces")
def test_a_checkpoint_without_room_costs_only_itself(course, tmp_path):
    """The disk has room for the model and one checkpoint and a quarter; then for half of it."""
    whole = course.whole()
    saved = read_checkpoint(whole / "checkpoints" / "step-00000006")
    one = sum(file.bytes for file in saved.files)
    model = sum(path.stat().st_size for path in (whole / "model").iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()

    def train(size, kept):
        limited = {"folder": str(disk), "size": size, "kept": str(tmp_path / kept)}
        (answer,) = course.start(disk / "run", disk=limited).answers()
        return answer, (tmp_path / kept / "run" / "metrics.jsonl").read_text().splitlines()

    done, measured = train(1.25 * one + model, "some room")
    assert done.code == 0, done
    assert failures(measured) == [4, 6]
    refused, measured = train((one + model) / 2, "no room")
    assert refused.code == 74, refused
    assert "Traceback" not in refused.err
    assert not [line for line in measured if '"loss"' in line]


def failures(lines):
    """The steps whose checkpoint could not be saved."""
    found = map(json.loads, lines)
    return sorted({line["step"] for line in found if "checkpoint_failed" in line})


@pytest.fixture
def scarce(monkeypatch):
    """Lets memory run out above 370 tokens, until it is told to stop."""
    forward = Policy.forward

    def refusing(policy, trees):
        if sum(tree.num_tokens for tree in trees) > 370:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(policy, trees)

    monkeypatch.setattr(Policy, "forward", refusing)
    return lambda: monkeypatch.setattr(Policy, "forward", forward)


def test_a_resumed_run_keeps_to_what_fits(training_world, tmp_path, scarce):
    run = tmp_path / "run"
    words = ("--cache", training_world.pairs, "--method", "dpo", "--max-steps", 4, "--no-mlflow")
    sized = ("--tokens-per-batch", 100_000, "--batch-size", 8, "--save-every", 2, "--lr", 1e-3)
    success("train", *words, *sized, "--output", run)
    report = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["memory/ran_out"] for line in report] == [1.0] * 4

    scarce()
    killed = shutil.copytree(run, tmp_path / "killed")
    for name in ("model", "checkpoints/step-00000004"):
        shutil.rmtree(killed / name)
    again = success("train", *words, *sized, "--output", killed, "--resume", "auto")
    weights = [(one / "model" / "model.safetensors").read_bytes() for one in (run, killed)]
    assert weights[0] == weights[1]
    checkpoints = [read_checkpoint(one / "checkpoints" / "step-00000004") for one in (run, killed)]
    assert checkpoints[0].state.fits == checkpoints[1].state.fits is not None
    require_names(again.err, "100,000", f"{checkpoints[0].state.fits.fits:,}")


def test_three_failed_checkpoints_in_a_row_end_a_run(training_world, tmp_path, monkeypatch):
    lacks = iter(["no room", "no room", "", "no room", "no room", "no room"])
    monkeypatch.setattr(checkpoint, "lack_of_space", lambda *_: next(lacks))
    run = tmp_path / "run"
    words = ("--cache", training_world.pairs, "--output", run, "--method", "dpo")
    often = ("--batch-size", 1, "--max-steps", 9, "--set", "train.save_every=1", "--no-mlflow")
    ended = align("train", *words, *often)
    assert ended.code == 74, ended
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert failures(lines) == [1, 2, 4, 5, 6]

    def refusing(*_):
        raise UsageError("no")

    # A run that fails before its next step ends where it resumes.
    monkeypatch.setattr(Policy, "forward", refusing)
    assert align("train", *words, *often, "--resume", "auto").code == 2
    assert read_ending(RunFolder(run)).step == 3


def test_an_evaluation_is_synced_before_its_checkpoint(training_world, tmp_path, monkeypatch):
    synced, known, fsync, save = {}, [], os.fsync, checkpoint.save_checkpoint

    def watched_fsync(file):
        fsync(file)
        synced[os.fstat(file).st_ino] = os.fstat(file).st_size

    def watched_save(folder, record, *others, **more):
        metrics = folder.metrics.stat()
        known.append((record.state.evaluated, synced.get(metrics.st_ino) == metrics.st_size))
        return save(folder, record, *others, **more)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(checkpoint, "save_checkpoint", watched_save)
    words = ("--cache", training_world.pairs, "--output", tmp_path / "run", "--method", "dpo")
    often = ("train.eval_fraction=0.3", "train.eval_every=1", "train.save_every=1")
    sets = [word for one in often for word in ("--set", one)]
    success("train", *words, "--batch-size", 1, "--max-steps", 2, "--no-mlflow", *sets)
    assert known == [(True, True)] * 2
