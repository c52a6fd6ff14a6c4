"""A run in a bucket: only what changed is pushed, and another machine resumes from it."""

import itertools

import pytest

from align.schemas.errors import CorruptionError, Interrupted, StorageError, UsageError
from align.stages.storage.disk import fs
from align.stages.storage.remote import Remote
from align.stages.storage.run.run_folder import RECORD_NAME, RunFolder
from align.stages.storage.run.run_remote import RunRemote
from support.checkpoint_saves import content, measure, save, train, writer
from support.flips import flipped
from support.object_server import Faults, faulty_proxy, use


@pytest.fixture
def other(tmp_path):
    """The folder of another machine."""
    folder = RunFolder(tmp_path / "other")
    folder.prepare()
    return folder


@pytest.fixture
def run_remote(prepared_run, bucket):
    """A run with a first checkpoint, which was pushed."""
    save(prepared_run, 2)
    prepared_run.metrics.write_text("{}\n")
    remote = RunRemote(Remote(bucket), prepared_run)
    remote.push()
    return remote


def test_only_files_that_changed_are_pushed(
    prepared_run, run_remote, bucket, object_server, monkeypatch
):
    faults = Faults(lambda *_: False)
    with faulty_proxy(object_server, faults) as url:
        use(monkeypatch, url)
        remote = RunRemote(Remote(bucket), prepared_run)
        remote.push()  # a new process does not know which records were pushed

        def pushed():
            faults.requests.clear()
            remote.push()
            return [path.rpartition("/")[2] for method, path in faults.requests if method == "PUT"]

        assert pushed() == []
        prepared_run.metrics.write_text("{}\n{}\n")
        assert pushed() == ["metrics.jsonl"]
        measure(prepared_run, 2, **{"eval/loss": 1.0})
        assert pushed() == [RECORD_NAME]
        save(prepared_run, 4)
        files = ["state-0.pt", "0-a.bin", "0-b.bin", RECORD_NAME]
        assert pushed() == files  # the record last
    save(prepared_run, 6)
    save(prepared_run, 8)
    run_remote.push()
    assert prepared_run.steps() == [2, 6, 8]
    steps = {name.split("/")[1] for name in run_remote.remote.list("checkpoints")}
    assert steps == {"step-00000002", "step-00000006", "step-00000008"}


def test_a_place_with_anything_in_it_is_not_begun_in(run_remote, bucket, tmp_path):
    with pytest.raises(UsageError, match=rf"{bucket} .*--resume auto"):
        run_remote.require_new()
    run_remote.remote.put("notes.txt", b"")
    for ask in (run_remote.require_new, run_remote.pull):
        with pytest.raises(UsageError, match=rf"{bucket} .*notes\.txt"):
            ask()


def test_a_buckets_checkpoint_replaces_a_local_one(run_remote, bucket, other):
    """As of a run that was begun anew since."""
    save(other, 2, write=writer(9))
    RunRemote(Remote(bucket), other).pull()
    assert (other.step(2) / "state-0.pt").read_bytes() == content(2, "state-0.pt")
    name = f"checkpoints/step-00000002/{RECORD_NAME}"
    run_remote.remote.put(name, run_remote.remote.get(name)[:40])
    with pytest.raises(CorruptionError, match=f"{bucket}/{name}"):
        run_remote.pull()


def test_a_model_is_pulled_only_from_a_run_that_has_ended(prepared_run, run_remote, bucket, other):
    fs.make_folder(prepared_run.model)
    (prepared_run.model / "model.safetensors").write_bytes(b"weights")
    run_remote.push()
    RunRemote(Remote(bucket), other).pull()
    assert not other.model.exists()
    prepared_run.ending.write_text("{}")
    run_remote.push()
    RunRemote(Remote(bucket), other).pull()
    assert (other.model / "model.safetensors").read_bytes() == b"weights"


def test_files_that_are_gone_here_are_removed_from_the_bucket(
    prepared_run, run_remote, bucket, other
):
    fs.make_folder(prepared_run.row_parts)
    made = (prepared_run.answers, prepared_run.rows, prepared_run.row_parts / "1.jsonl")
    for path in made:
        path.write_text("{}\n")
    run_remote.push()
    fs.make_folder(other.row_parts)
    (other.row_parts / "2.jsonl").write_text("of a machine that was killed then")
    RunRemote(Remote(bucket), other).pull()
    assert other.answers.exists()
    assert other.rows_written() == [other.row_parts / "1.jsonl"]
    for path in made:
        path.unlink()
    run_remote.push()
    names = {path.relative_to(prepared_run.root).as_posix() for path in made}
    assert not names & run_remote.remote.list().keys()


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), Interrupted(15), StorageError("full")])
def test_a_run_is_pushed_however_it_ends(prepared_run, run_remote, ending):
    def end():
        prepared_run.metrics.write_text("{}\n{}\n")
        raise ending

    with pytest.raises(type(ending)), run_remote.pushed_at_end():
        end()
    assert run_remote.remote.get("metrics.jsonl") == b"{}\n{}\n"
    with run_remote.pushed_at_end():
        prepared_run.metrics.write_text("{}\n" * 3)
    assert run_remote.remote.get("metrics.jsonl") == b"{}\n" * 3


def held(folder):
    """What a machine has of a run's checkpoints."""
    paths = [path for path in folder.checkpoints.rglob("*") if path.is_file()]
    return {path.relative_to(folder.root): path.read_bytes() for path in paths}


def test_a_flipped_bit_of_a_checkpoint_in_a_bucket_reaches_no_other_machine(bucket, tmp_path):
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
    for name in remote.list("checkpoints"):
        good = remote.get(name)
        for damaged in flipped(good, 2):
            remote.put(name, damaged)
            try:
                assert pulled() == whole, name
            except CorruptionError as error:
                found += 1
                assert name in str(error)  # noqa: PT017
        remote.put(name, good)
    assert found > 8
