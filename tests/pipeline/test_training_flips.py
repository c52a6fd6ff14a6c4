"""What a disk has damaged of a run is found, or changes nothing: it is never used in silence.

Each flip is of a random bit of one record; whoever reads it afterwards either refuses, naming the
file, or gives the answer of before.
"""

import random
import shutil

import pytest

from align.schemas.errors import CorruptionError, FingerprintError
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


def by_its_ledger(run):
    return ledger_of(RunFolder(run)).record


READERS = {"_align/mlflow.json": by_its_ledger, "_align/ending.json": as_it_ended}
DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "deep": lambda _: b'{"a": ' * 100_000,
    "no text": lambda _: b"\xff\xfe\x00",
    "another type": lambda _: b"[1]",
    "a line less": lambda content: content.partition(b"\n")[2],
}


@pytest.mark.parametrize("count", [25, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", READERS)
def test_damage_to_a_file_of_a_run_is_never_used_in_silence(ended, tmp_path, name, count):
    run, read = shutil.copytree(ended, tmp_path / "run"), READERS[name]
    path = run / name
    whole, before = path.read_bytes(), read(run)
    for damage in DAMAGES.values():
        path.write_bytes(damage(whole))
        assert is_refused(read, run, before, path)
    draw = random.Random(SEED)
    for _ in range(count):
        place = draw.randrange(len(whole))
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        assert is_refused(read, run, before, path), place


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
