"""What a run may go on from: the records beside its checkpoint must match, and be those of it."""

import dataclasses
import os
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from align.schemas.json_codec import to_signed_json
from align.stages.storage.cache import Cache
from align.stages.storage.run.checkpoints import read_checkpoint
from align.stages.storage.run.run_folder import RECORD_NAME, RunFolder, read_ending
from align.stages.tracking.run_record import RunRecord
from support.command import success
from support.refusals import require_names
from support.stage_one import contents
from support.trainings import KILLED, learned, refused, require_same, weights

RESUME = ("--resume", "auto")


def differences(said):
    """What a refusal says of each setting that it names in a line of its own."""
    return dict(re.findall(r"^  ([\w. ]+): (.+)$", said, re.MULTILINE))


def test_what_is_learned_by_may_not_change_and_is_named(course, broken_run, world):
    changes = ("--lr", 2e-3, "--batch-size", 5, "--method", "kto_zero", "--seed", 1, "--lora")
    said = refused(course, 4, broken_run, *RESUME, *changes, "--set", "method.beta=0.5")
    expected = {
        "train.lr": ["0.001", "0.002"],
        "train.batch_size": ["4", "5"],
        "train.method": ["'kto'", "'kto_zero'"],
        "train.seed": ["0", "1"],
        "lora.enabled": ["False", "True"],
        "method.beta": ["0.1", "0.5"],
    }
    differing = differences(said)
    assert len(differing) == 8  # with two options that only KTO has
    for name, values in expected.items():
        require_names(differing[name], *values)
    attention = (*RESUME, "--set", "model.attention=eager")
    refused(course, 4, broken_run, *attention, names=("model.attention", "sdpa", "eager"))
    refused(course, 2, broken_run, names=("--resume auto",))
    cache = broken_run.with_name("other-cache")
    made = ("--model", course.model, "--output", cache, "--no-mlflow", "--set", "cache.shards=3")
    course.server.success("precompute-ref", world.data.paired, *made)
    root = Cache(cache).manifest().root
    refused(course, 4, broken_run, *RESUME, "--cache", cache, names=("--cache", root[:12]))


def test_a_run_begun_anew_is_the_same_in_mlflow(course, own_uri, tmp_path):
    run, keys = tmp_path / "run", []
    told = ("--mlflow", "--set", f"tracking.uri={own_uri}")
    for words in ((), (), ("--lr", 2e-3)):
        place = "before:make_folder:checkpoints/.tmp-*=kill@1"
        course.ends(KILLED, run, *told, *RESUME, *words, fault=place)
        keys.append(RunRecord.find(RunFolder(run)).facts.key)
    first, again, other = keys
    assert first == again != other


def test_another_base_under_an_adapter_is_refused(course, tmp_path):
    """Orpo asks for no reference, so nothing else holds the base to the cache."""
    run, base = tmp_path / "run", shutil.copytree(course.model, tmp_path / "base")
    options = ("--method", "orpo", "--lora", "--model", base)
    course.ends(KILLED, run, *options, fault="before:update=kill@6")
    tensors = load_file(base / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1e-3
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert {*differences(refused(course, 4, run, *options, *RESUME))} == {"model.weights"}
    moved = shutil.copytree(course.model, tmp_path / "moved")
    course.run(run, *options, "--model", moved, *RESUME)
    assert read_ending(RunFolder(run)).ending == "finished"


def test_with_its_records_lost_the_checkpoint_decides(course, broken_run):
    """Another torch made it, by its record; a setting that changes no result may change."""
    changes = ("--seed", 1, "--set", "method.beta=0.5", "--set", "train.weight_decay=0.1")
    engine = (broken_run / "deepspeed.json").read_bytes()
    for name in ("config.yaml", "deepspeed.json", "metrics.jsonl"):
        (broken_run / name).unlink()
    step = broken_run / "checkpoints" / "step-00000004"
    known = read_checkpoint(step)
    made_with = {**known.made_with, "torch": "2.0.1"}
    record = dataclasses.replace(known, made_with=made_with)
    (step / RECORD_NAME).write_text(to_signed_json(record))

    said = refused(course, 4, broken_run, *RESUME, *changes)
    assert {*differences(said)} == {"method.beta", "train.seed", "train.weight_decay"}
    cache = shutil.copytree(course.cache, broken_run.with_name("moved-cache"))
    free = ("--tokens-per-batch", 99_999, "--save-every", 1, "--keep-last", 3, "--eval-every", 5)
    answer = course.run(broken_run, *RESUME, *free, "--cache", cache)
    assert weights(broken_run) == weights(course.whole())
    steps = sorted(path.name for path in (broken_run / "checkpoints").glob("step-*"))
    assert steps == ["step-00000004", "step-00000005", "step-00000006"]
    assert (broken_run / "deepspeed.json").read_bytes() == engine
    assert {line["step"] for line in learned(broken_run)} == {5, 6}
    torch = f"after step 4: torch 2.0.1 → {known.made_with['torch']}"
    assert torch in answer.err
    assert read_ending(RunFolder(broken_run)).changes == (torch,)
    newest = read_checkpoint(broken_run / "checkpoints" / "step-00000006")
    assert newest.changes == (torch,)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_damaged_checkpoint_is_passed_over(course, tmp_path, ranks):
    """Of two ranks the first reads the largest file, and the second one the next."""
    broken_run = tmp_path / "run"
    kill = ["before:update=kill@6"] * ranks
    for answer in course.start(broken_run, ranks=ranks, faults=kill).answers():
        assert answer.code == KILLED
    newest = broken_run / "checkpoints" / "step-00000004"
    victim = sorted(newest.rglob("*.pt"), key=lambda path: path.stat().st_size)[-ranks]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    answer = course.run(broken_run, *RESUME, ranks=ranks)
    require_names(answer.err, "step-00000004", victim.name, "after step 2")
    require_same(broken_run, course.whole(ranks=ranks))


@pytest.fixture(scope="module")
def finished(course, uri, tmp_path_factory):
    """A run that MLflow was told of; begun with --resume auto where there was nothing."""
    run = tmp_path_factory.mktemp("finished") / "run"
    course.run(run, *RESUME, "--mlflow", "--set", f"tracking.uri={uri}")
    return run


def touched(run):
    """Bytes and times of every file and folder."""
    times = {str(path): path.stat().st_mtime_ns for path in (run, *run.rglob("*"))}
    return times, contents(run), (run / "_align" / "LOCK").read_bytes()


def test_a_finished_run_is_not_touched(course, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    refused(course, 2, run, names=(run, "--resume auto"))
    before = touched(run)
    answer = course.run(run, *RESUME, "--set", "train.log_every=7", "--keep-last", 1)
    assert "6 steps" in answer.out
    assert touched(run) == before
    (run / "config.yaml").unlink()
    refused(course, 4, run, *RESUME, "--seed", 1, names=("train.seed: ",))
    config = run / "model" / "config.json"
    described = config.read_bytes()
    config.write_bytes(b"{")
    refused(course, 2, run, *RESUME, names=(config,))
    config.write_bytes(described)
    (run / "metrics.jsonl").unlink()
    answer = course.run(run, *RESUME)
    assert "6 steps" in answer.out
    assert "metrics.jsonl" in answer.err


def test_a_run_is_finished_because_it_says_so(course, finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(copy / "model", ns=(0, 0))
    record = RunRecord.find(RunFolder(copy))
    record.change(status="", ended_ms=0)
    uri = record.facts.stores["mlflow"].address
    assert "FINISHED" in course.server.run("mlflow-sync", copy, "--uri", uri).out
    trained = weights(copy)
    course.run(copy, *RESUME)
    assert weights(copy) == trained
    (copy / "_align" / "ending.json").unlink()
    success("report", copy)
    assert "6 steps, not finished." in (copy / "report.html").read_text()


def test_a_finished_run_can_be_made_longer(course, tmp_path):
    run = shutil.copytree(course.whole(), tmp_path / "run")
    answer = course.run(run, *RESUME, "--max-steps", 8)
    require_names(answer.err, "train.max_steps: ", "after step 6")
    assert max(line["step"] for line in learned(run)) == 8
    assert weights(run) != weights(course.whole())
