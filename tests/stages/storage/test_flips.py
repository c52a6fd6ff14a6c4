"""A flipped bit of what is written once and read again is refused by name, or changes nothing."""

import itertools

import pytest

from align.schemas.errors import CorruptionError
from align.schemas.round_record import RoundRecord
from align.stages.storage.remote import Remote
from align.stages.storage.run.rounds_folder import ROUNDS, RoundsFolder
from align.stages.storage.run.run_folder import RunFolder
from align.stages.storage.run.run_remote import RunRemote
from support.checkpoint_saves import train
from support.flips import flipped, flips


def make_round(base):
    settings, counts = {"sample.n": "4"}, {"pairs": 7}
    record = RoundRecord(1, 1, {"policy": "a"}, settings, {}, counts, {"loss": 0.5}, None)
    ROUNDS.put(base / "round.json", record)


def test_a_round_that_has_the_record_of_another_is_refused(tmp_path):
    rounds = RoundsFolder(tmp_path)
    for number in (1, 2):
        rounds.round(number).root.mkdir()
        make_round(rounds.round(number).root)
    with pytest.raises(CorruptionError, match=r"round-002/round\.json"):
        rounds.finished()


@pytest.mark.parametrize("count", [30, pytest.param(600, marks=pytest.mark.long)])
def test_a_flipped_bit_of_a_round_is_refused_by_name(tmp_path, count):
    make_round(tmp_path)
    path = tmp_path / "round.json"
    for damaged in flipped(path.read_bytes(), count):
        path.write_bytes(damaged)
        with pytest.raises(CorruptionError, match=r"round\.json"):
            ROUNDS.read(path)


def held(folder):
    """What a machine has of a run's checkpoints."""
    paths = [path for path in folder.checkpoints.rglob("*") if path.is_file()]
    return {path.relative_to(folder.root): path.read_bytes() for path in paths}


@pytest.mark.parametrize("count", [30, pytest.param(600, marks=pytest.mark.long)])
def test_a_flipped_bit_of_a_checkpoint_in_a_bucket_reaches_no_other_machine(
    bucket, tmp_path, count
):
    run, numbers, found = RunFolder(tmp_path / "run"), itertools.count(), 0
    train(run, lambda *_: None)
    run.metrics.write_text("{}\n")
    remote = Remote(bucket)
    RunRemote(remote, run).push()

    def pulled():
        other = RunFolder(tmp_path / f"other-{next(numbers)}")
        other.prepare()
        RunRemote(remote, other).pull()
        return held(other)

    whole = pulled()
    assert whole == held(run)
    kept = {name: remote.get(name) for name in remote.list() if name.startswith("checkpoints/")}
    for name, byte, bit in flips({name: len(good) for name, good in kept.items()}, count):
        good = kept[name]
        remote.put(name, good[:byte] + bytes([good[byte] ^ 1 << bit]) + good[byte + 1 :])
        try:
            assert pulled() == whole, (name, byte, bit)
        except CorruptionError as error:
            found += 1
            assert name in str(error)  # noqa: PT017
        remote.put(name, good)
    assert found > count // 2
