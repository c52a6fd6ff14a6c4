"""A commit of preparing names a file that is whole, whatever a power loss leaves of both."""

import hashlib
import re

import pytest

from align.schemas.errors import CorruptionError
from align.schemas.json_codec import CodecError, from_signed_json
from align.schemas.preparing import EncodedPart, PartFile
from align.stages.storage import failpoints, fs, spool
from support.power_loss import Promise, ops_of, states_of, watcher


def make(place, number, content):
    """Commits a task that leaves these bytes."""
    with spool.new_part(place.encoded(number)) as part:
        part.write(content)
    spool.put_commit(place.encoded(number), EncodedPart(part.file, 0, 0, 0, 0, {}, {}, ()))


def recorded(base):
    """The operations of two tasks, and when each was done."""
    log = []
    with failpoints.watch(watcher(log)):
        place = spool.Spool(base / "spool")
        fs.make_folder(place.root)  # as the folder of the work does
        fs.fsync_folder(base)
        place.prepare()
        for number in range(2):
            make(place, number, b"rows of %d" % number)
            log.append(Promise("encoded", f"{number:08d}"))
    return log


def first_broken(log, base):
    """What is wrong with the first bad state; None when none is."""
    for left, promises in states_of(log, base):
        commits = {path: content for path, content in left.items() if path.endswith("0.json")}
        commits |= {path: content for path, content in left.items() if path.endswith("1.json")}
        for path, content in commits.items():
            try:
                file = from_signed_json(EncodedPart, content).file
            except CodecError:
                return f"{path} is torn"
            found = left.get(f"spool/encoded/{file.name}", b"")
            if hashlib.sha256(found).hexdigest() != file.sha256:
                return f"{path} names a file that is not there"
        for promise in promises:
            if f"spool/encoded/{promise.key}.json" not in left:
                return f"{promise.key} was promised and is gone"
    return None


def test_every_state_that_a_power_loss_may_leave_can_be_gone_on_from(tmp_path):
    assert first_broken(recorded(tmp_path), tmp_path) is None


def test_without_any_one_of_its_syncs_some_state_is_broken(tmp_path):
    log = recorded(tmp_path)
    begun = next(place for place, op in enumerate(ops_of(log)) if op.name == "create")
    syncs = {(op.name, op.site) for op in ops_of(log)[begun:] if op.name.startswith("fsync")}
    assert len(syncs) == 4  # the file, its name, its commit, the commit's name
    for sync in syncs:
        kept = [one for one in log if isinstance(one, Promise) or (one.name, one.site) != sync]
        assert first_broken(kept, tmp_path), sync


def test_a_damaged_commit_is_refused_by_name(tmp_path):
    place = spool.Spool(tmp_path)
    place.prepare()
    make(place, 0, b"rows")
    assert spool.find_commit(EncodedPart, place.encoded(0)).file.bytes == 4
    commit = place.encoded(0)
    commit.write_bytes(commit.read_bytes().replace(b'"runs":0', b'"runs":1'))
    with pytest.raises(CorruptionError, match=r"00000000\.json is damaged: .* Remove this file"):
        spool.find_commit(EncodedPart, commit)


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("../plan.json", hashlib.sha256(b"rows").hexdigest()),
        ("00000000-/../../plan.arrows", "/../../plan"),
    ],
)
def test_a_commit_that_names_a_file_elsewhere_is_refused(tmp_path, name, sha256):
    place = spool.Spool(tmp_path)
    place.prepare()
    elsewhere = PartFile(name, 4, sha256)
    spool.put_commit(place.encoded(0), EncodedPart(elsewhere, 0, 0, 0, 0, {}, {}, ()))
    with pytest.raises(CorruptionError, match=f"it names the file '{re.escape(name)}'"):
        spool.find_commit(EncodedPart, place.encoded(0))


def test_a_task_that_is_not_done_has_no_record(tmp_path):
    place = spool.Spool(tmp_path)
    place.prepare()
    assert spool.find_commit(EncodedPart, place.encoded(0)) is None
    make(place, 0, b"rows")
    next(place.encoded(0).parent.glob("*.arrows")).unlink()
    assert spool.find_commit(EncodedPart, place.encoded(0)) is None


def test_a_commit_that_another_made_and_removed_meanwhile_is_no_longer_needed(
    tmp_path, monkeypatch
):
    place = spool.Spool(tmp_path)
    place.prepare()
    make(place, 0, b"rows")
    put = fs.put_if_absent

    def put_late(path, payload, *, label):
        won = put(path, payload, label=label)
        place.forget_encoded()  # by another, which has the whole ring
        return won

    monkeypatch.setattr(fs, "put_if_absent", put_late)
    make(place, 0, b"rows")
    assert not [*(tmp_path / "encoded").iterdir()]
