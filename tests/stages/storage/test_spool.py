"""A commit of preparing names a file that is whole; see test_power_loss too."""

import hashlib
import re

import pytest

from align.schemas.errors import CorruptionError
from align.schemas.preparing import EncodedPart, PartFile
from align.stages.storage import fs, spool


def make(place, number, content):
    """Commits a task that leaves these bytes."""
    with spool.new_part(place.encoded(number)) as part:
        part.write(content)
    spool.put_commit(place.encoded(number), EncodedPart(part.file, 0, 0, 0, 0, {}, {}, ()))


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
