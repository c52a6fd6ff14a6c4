"""What a disk has damaged of a run is found, or changes nothing: it is never used in silence.

`align report` and `--resume auto` read what lies in the folder. Each flip is of a random bit of one
file; whoever reads it afterwards either refuses, naming the file, or gives the answer of before.
"""

import json
import random
import shutil

import pytest

from align.pipeline.options.settings import run_settings
from align.pipeline.train.resume import require_same_engine_file, require_whole_records
from align.schemas.errors import CorruptionError, FingerprintError
from align.stages.storage.run.checkpoints import choose_checkpoint
from align.stages.storage.run.run_folder import RunFolder, read_ending
from support.flips import SEED
from support.mlflow_runs import ledger_of


@pytest.fixture(scope="module")
def ended(course, tmp_path_factory):
    """A finished run with a record for MLflow."""
    folder = tmp_path_factory.mktemp("ended")
    run, uri = folder / "run", f"sqlite:///{folder / 'mlflow.db'}"
    course.run(run, "--mlflow", "--set", f"tracking.uri={uri}")
    return run


def as_it_ended(run):
    """What a report, `mlflow-sync` and a finished run's `--resume auto` rely on."""
    return read_ending(RunFolder(run))


def as_it_goes_on(run):
    """What `--resume auto` relies on beside the checkpoint's own files."""
    position = choose_checkpoint(RunFolder(run)).checkpoint.position
    assert require_whole_records(RunFolder(run), position) == ()
    return position


def by_its_settings(run):
    return run_settings(RunFolder(run))


def by_its_ledger(run):
    return ledger_of(RunFolder(run)).record


def by_its_engine(run):
    """Held to what the checkpoint says, as a resume does once the policy is loaded."""
    require_same_engine_file(RunFolder(run), (run.parent / "engine").read_bytes())


# File, and who reads it; of a run that ended, or that was broken off.
READERS = [
    ("ended", "metrics.jsonl", as_it_ended),
    ("broken_off", "metrics.jsonl", as_it_goes_on),
    ("broken_off", "config.yaml", by_its_settings),
    ("broken_off", "deepspeed.json", by_its_engine),
    ("ended", "_align/mlflow.json", by_its_ledger),
    ("ended", "_align/ending.json", as_it_ended),
]
DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "deep": lambda _: b'{"a": ' * 100_000,
    "no text": lambda _: b"\xff\xfe\x00",
    "another type": lambda _: b"[1]",
    "a line less": lambda content: content.partition(b"\n")[2],
}


@pytest.mark.parametrize("count", [25, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", READERS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_damage_to_a_file_of_a_run_is_never_used_in_silence(
    ended, broken_off, tmp_path, case, count
):
    source, name, read = case
    run = shutil.copytree(ended if source == "ended" else broken_off, tmp_path / "run")
    shutil.copy(run / "deepspeed.json", tmp_path / "engine")
    path = run / name
    whole, before = path.read_bytes(), read(run)
    for damage in DAMAGES.values():
        path.write_bytes(damage(whole))
        assert is_refused(read, run, before, path)
    # Of a run that was killed, the lines after its checkpoint are dropped before they are read.
    end = before.journal.bytes if read is as_it_goes_on else len(whole)
    draw = random.Random(SEED)
    for _ in range(count):
        place = draw.randrange(end)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        assert is_refused(read, run, before, path) or says_another_spread(path, whole), place


def is_refused(read, run, before, path):
    """Whether the reader refuses, naming the file; else it has to give the answer of before."""
    try:
        assert read(run) == before
    except (CorruptionError, FingerprintError) as error:
        said = str(error)
        # Another format is told before a digest is looked at.
        is_damage = isinstance(error, CorruptionError) or "format version" in said
        return is_damage and path.name in said
    return False


def says_another_spread(path, whole):
    """Whether a deepspeed.json is that of other ranks or another stage: it is written again."""
    if path.name != "deepspeed.json":
        return False
    found, known = (json.loads(text) for text in (path.read_bytes(), whole))
    known |= {"train_batch_size": found["train_batch_size"]}
    known["zero_optimization"] |= {"stage": found["zero_optimization"]["stage"]}
    return found == known
