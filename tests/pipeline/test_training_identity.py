"""A checkpoint names the run it is of, and the records beside it must match it."""

import dataclasses
import os
import shutil

from safetensors.torch import load_file, save_file

from align.schemas.json_codec import digest_of, to_json
from align.stages.storage.checkpoints import read_checkpoint
from align.stages.storage.run_folder import RECORD_NAME, RunFolder, read_ending
from align.stages.tracking.outbox import load_ledger
from support.command import align, refusal
from support.trainings import KILLED, contents, learned, refused, weights

RESUME = ("--resume", "auto")


def test_another_base_under_an_adapter_is_refused(course, tmp_path):
    """Orpo asks for no reference, so nothing else holds the base to the cache."""
    run, base = tmp_path / "run", shutil.copytree(course.model, tmp_path / "base")
    options = ("--method", "orpo", "--lora", "--model", base)
    (answer,) = course.start(run, *options, failpoints=["step.started=kill@6"]).answers()
    assert answer.code == KILLED
    tensors = load_file(base / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1e-3
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    said = refused(course, 4, run, *options, *RESUME)
    assert "  model.weights: begun with " in said
    assert said.count(": begun with ") == 1
    moved = shutil.copytree(course.model, tmp_path / "moved")
    course.run(run, *options, "--model", moved, *RESUME)
    assert read_ending(RunFolder(run)).ending == "finished"


def test_with_config_yaml_lost_the_checkpoint_decides(course, broken_run):
    (broken_run / "config.yaml").unlink()
    changes = ("--seed", 1, "--set", "method.beta=0.5", "--set", "train.weight_decay=0.1")
    said = refused(course, 4, broken_run, *RESUME, *changes)
    for line in (
        "method.beta: begun with 0.1, now 0.5",
        "train.seed: begun with 0, now 1",
        "train.weight_decay: begun with 0.0, now 0.1",
    ):
        assert f"  {line}\n" in said
    assert said.count(": begun with ") == 3
    course.run(broken_run, *RESUME)
    assert weights(broken_run) == weights(course.whole())
    assert (broken_run / "config.yaml").exists()


def test_another_attention_is_refused(course, broken_run):
    said = refused(course, 4, broken_run, *RESUME, "--set", "model.attention=eager")
    assert "  model.attention: begun with sdpa, now eager\n" in said
    assert said.count(": begun with ") == 1


def test_a_damaged_record_of_a_run_is_refused_before_anything_is_touched(course, broken_run):
    """Which damages are found is in test_training_flips."""
    for name in ("config.yaml", "deepspeed.json"):
        path = broken_run / name
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b"0.001", b"0.003"))
        said = refused(course, 5, broken_run, *RESUME)
        assert f"{path} is damaged or was edited" in said
        assert "emove it" in said
        path.write_bytes(whole)
    journal = broken_run / "metrics.jsonl"
    journal.write_bytes(journal.read_bytes().split(b"\n", 1)[1])
    said = refused(course, 5, broken_run, *RESUME)
    assert f"{journal} does not begin with the " in said
    assert "at the checkpoint of step 4" in said


def test_a_deepspeed_json_that_is_lost_is_written_again(course, broken_run):
    before = (broken_run / "deepspeed.json").read_bytes()
    (broken_run / "deepspeed.json").unlink()
    course.run(broken_run, *RESUME)
    assert (broken_run / "deepspeed.json").read_bytes() == before


def test_a_journal_that_is_lost_is_reported(course, broken_run):
    (broken_run / "metrics.jsonl").unlink()
    answer = course.run(broken_run, *RESUME)
    assert "metrics.jsonl is missing: what was measured up to step 4 is lost" in answer.err
    assert weights(broken_run) == weights(course.whole())
    assert {line["step"] for line in learned(broken_run)} == {5, 6}
    assert read_ending(RunFolder(broken_run)).changes == ("metrics.jsonl was missing after step 4",)


def test_other_versions_are_named_and_written_down(course, broken_run):
    """The record of the checkpoint says that another torch made it."""
    step = broken_run / "checkpoints" / "step-00000004"
    known = read_checkpoint(step)
    made_with = {**known.position.made_with, "torch": "2.0.1"}
    position = dataclasses.replace(known.position, made_with=made_with)
    unsigned = dataclasses.replace(known, position=position)
    record = dataclasses.replace(unsigned, digest=digest_of(unsigned, "digest"))
    (step / RECORD_NAME).write_text(to_json(record))
    answer = course.run(broken_run, *RESUME)
    change = f"after step 4: torch 2.0.1 → {known.position.made_with['torch']}"
    assert change in answer.err
    assert read_ending(RunFolder(broken_run)).changes == (change,)
    newest = read_checkpoint(broken_run / "checkpoints" / "step-00000006")
    assert newest.position.changes == (change,)
    assert "torch 2.0.1 → " in (broken_run / "report.html").read_text()


def test_a_finished_run_is_not_touched(course, tmp_path):
    run = shutil.copytree(course.whole(), tmp_path / "run")
    before = touched(run)
    answer = course.run(run, *RESUME, "--set", "train.log_every=7", "--keep-last", 1)
    assert "already: this run is finished" in answer.out
    assert touched(run) == before
    (run / "config.yaml").unlink()
    before = touched(run)
    said = refused(course, 4, run, *RESUME, "--seed", 1)
    assert "train.seed: begun with 0, now 1" in said
    assert "already: this run is finished" in course.run(run, *RESUME).out
    assert touched(run) == before
    (run / "metrics.jsonl").unlink()
    answer = course.run(run, *RESUME)
    assert "6 steps done already: this run is finished" in answer.out
    assert "metrics.jsonl is missing: what was measured is lost" in answer.err


def touched(run):
    """Bytes and times of every file and folder."""
    times = {str(path): path.stat().st_mtime_ns for path in (run, *run.rglob("*"))}
    return times, contents(run), (run / "_align" / "LOCK").read_bytes()


def test_a_run_is_finished_because_it_says_so_and_not_by_the_times_of_its_files(course, tmp_path):
    run, uri = tmp_path / "run", f"sqlite:///{tmp_path / 'mlflow.db'}"
    course.run(run, "--mlflow", "--set", f"tracking.uri={uri}")
    ending = read_ending(RunFolder(run))
    assert (ending.ending, ending.step, ending.total_steps) == ("finished", 6, 6)
    copy = shutil.copytree(run, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(copy / "model", ns=(0, 0))
    load_ledger(RunFolder(copy).mlflow).change(status="", ended_ms=0)
    assert "is FINISHED" in course.server.run("mlflow-sync", copy, "--uri", uri).out
    assert align("report", copy).code == 0
    assert "6 steps, finished." in (copy / "report.html").read_text()
    assert "already: this run is finished" in course.run(copy, *RESUME).out
    (copy / "_align" / "ending.json").unlink()
    assert align("report", copy).code == 0
    assert "6 steps, not finished." in (copy / "report.html").read_text()


def test_what_was_measured_is_not_read_once_it_was_edited(course, tmp_path):
    run = shutil.copytree(course.whole(), tmp_path / "run")
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"loss":0.', b'"loss":1.', 1))
    for said in (refusal(5, "report", run), refused(course, 5, run, *RESUME)):
        assert f"{path} is damaged: it differs from what the run left" in said
        assert "ending.json" in said
