"""A flipped bit in what a run has written is found, or changes nothing: never used in silence.

`align report` and `--resume auto` read what lies in the folder. Each flip is of a random bit of one
file; whoever reads it afterwards either refuses, naming the file, or gives the answer of before.
"""

import json
import random
import shutil

import pytest

from align.pipeline.resume import require_same_engine_file, require_whole_records
from align.pipeline.settings import run_settings
from align.schemas.errors import CorruptionError, FingerprintError
from align.stages.storage.checkpoints import choose_checkpoint, read_checkpoint
from align.stages.storage.run_folder import RECORD_NAME, RunFolder, read_ending
from align.stages.tracking.outbox import load_ledger

SEED = 20


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
    return load_ledger(RunFolder(run).mlflow).record


def by_its_record(run):
    return read_checkpoint(run / "checkpoints" / "step-00000004")


def by_its_engine(run):
    """Held to what the checkpoint says, as a resume does once the policy is loaded."""
    require_same_engine_file(RunFolder(run), (run.parent / "engine").read_bytes())


# File, who reads it, and what it may refuse with: a format version that was flipped is another.
READERS = {
    "metrics.jsonl": ("ended", as_it_ended),
    "metrics.jsonl of a run that was killed": ("broken_off", as_it_goes_on),
    "config.yaml": ("broken_off", by_its_settings),
    "deepspeed.json": ("broken_off", by_its_engine),
    "_align/mlflow.json": ("ended", by_its_ledger),
    "_align/ending.json": ("ended", as_it_ended),
    f"checkpoints/step-00000004/{RECORD_NAME}": ("broken_off", by_its_record),
}
CASES = [
    pytest.param(case, count, marks=[pytest.mark.long] if count > 100 else [], id=f"{case}-{count}")
    for case in READERS
    for count in (25, 400)
]


def refusal(read, run, before):
    """What the reader says; empty where it gives the answer of before."""
    try:
        assert read(run) == before
    except CorruptionError as error:
        return str(error)
    except FingerprintError as error:  # another format is told before a digest is looked at
        return str(error) if "format version" in str(error) else ""
    return ""


@pytest.mark.parametrize(("case", "count"), CASES)
def test_a_flipped_bit_is_never_used_in_silence(ended, broken_off, tmp_path, case, count):
    source, read = READERS[case]
    sources = {"ended": ended, "broken_off": broken_off}
    run = shutil.copytree(sources[source], tmp_path / "run")
    shutil.copy(run / "deepspeed.json", tmp_path / "engine")
    path = run / case.partition(" ")[0]
    whole, before = path.read_bytes(), read(run)
    # Of a run that was killed, the lines after its checkpoint are dropped before they are read.
    end = before.journal.bytes if read is as_it_goes_on else len(whole)
    rng = random.Random(SEED)
    found = 0
    for _ in range(count):
        place = rng.randrange(end)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        said = refusal(read, run, before)
        assert not said or path.name in said or path.parent.name in said
        found += bool(said) or says_another_spread(path, whole)
    print(f"{case}: {found} of {count} flips found, {count - found} without effect, seed {SEED}")
    assert found == count


def says_another_spread(path, whole):
    """Whether a deepspeed.json is that of other ranks or another stage: it is written again."""
    if path.name != "deepspeed.json":
        return False
    found, known = (json.loads(text) for text in (path.read_bytes(), whole))
    known |= {"train_batch_size": found["train_batch_size"]}
    known["zero_optimization"] |= {"stage": found["zero_optimization"]["stage"]}
    return found == known


DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "deep": lambda _: b'{"a": ' * 100_000,
    "no text": lambda _: b"\xff\xfe\x00",
    "another type": lambda _: b"[1]",
    "a line less": lambda content: content.partition(b"\n")[2],
}


@pytest.mark.parametrize("case", READERS)
def test_a_file_that_was_cut_or_replaced_is_refused_by_its_name(ended, broken_off, tmp_path, case):
    source, read = READERS[case]
    run = shutil.copytree({"ended": ended, "broken_off": broken_off}[source], tmp_path / "run")
    shutil.copy(run / "deepspeed.json", tmp_path / "engine")
    path = run / case.partition(" ")[0]
    whole, before = path.read_bytes(), read(run)
    for name, damage in DAMAGES.items():
        path.write_bytes(damage(whole))
        said = refusal(read, run, before)
        assert path.name in said or path.parent.name in said, name
