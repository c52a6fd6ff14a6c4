"""Objects of a real S3 server: writes, races, answers that are lost, and the copies on a disk."""

import hashlib
import subprocess
import sys
import threading
import time

import pytest

from align.schemas.errors import CorruptionError, LockedError, StorageError, UsageError
from align.stages.storage.bucket import local_copies, objects
from align.stages.storage.bucket.bucket_store import AT_ONCE
from align.stages.storage.store import store_of
from support.object_server import BUCKET, Faults, client, faulty_proxy, use
from support.patience import PATIENCE
from support.store_contract import WRITERS, at_the_same_time


@pytest.fixture
def faults():
    return Faults(is_conditional)


def is_conditional(method, _, headers):
    """Whether a request may write only over what its writer knows."""
    return method == "PUT" and ("If-None-Match" in headers or "If-Match" in headers)


@pytest.fixture
def far_bucket(object_server, faults, bucket, monkeypatch):
    """A place in the bucket, seen through a proxy that loses answers."""
    with faulty_proxy(object_server, faults) as url:
        use(monkeypatch, url, AWS_TIMEOUT="0.3s")
        yield bucket


def test_of_those_who_replace_one_object_all_but_the_first_are_refused(bucket):
    path, refused = bucket / "grown", []
    objects.put(path, b"first")

    def replace(writer):
        try:
            store_of(path).replace(path, b"%d" % writer, known=b"first")
        except LockedError:
            refused.append(writer)

    at_the_same_time(replace)
    assert sorted([*refused, int(objects.read(path))]) == [*range(WRITERS)]


# Before or after (+) the server did its work: refusals of three kinds, no answer, a late one.
@pytest.mark.parametrize("fault", ["412+", "409", "503", "drop", "drop+", "hang+"])
def test_a_commit_whose_answer_is_lost_is_neither_lost_nor_made_twice(far_bucket, faults, fault):
    faults.waiting[:] = [fault]
    path = far_bucket / "lost"
    assert objects.put_new(path, b"ours")
    assert faults.injected == [fault]
    assert objects.read(path) == b"ours"
    assert objects.put_new(path, b"ours"), "a retry of one's own"
    faults.waiting[:] = [fault]
    assert not objects.put_new(path, b"theirs")
    assert objects.read(path) == b"ours"


@pytest.mark.parametrize("fault", ["412+", "409", "drop+"])
def test_a_replaced_object_whose_answer_is_lost_holds_the_new_bytes(
    far_bucket, faults, fault, monkeypatch
):
    path = far_bucket / "grown"
    objects.put_over(path, b"first", expected=None)
    faults.waiting[:] = [fault]
    objects.put_over(path, b"second", expected=b"first")
    assert faults.injected == [fault]
    assert objects.read(path) == b"second"
    with pytest.raises(LockedError, match="changed by another process"):
        objects.put_over(path, b"third", expected=b"first")
    assert objects.read(path) == b"second"
    monkeypatch.setattr(objects, "PAUSES", (0.0, 0.0))
    faults.waiting[:] = ["409"] * 2
    with pytest.raises(StorageError, match=rf"{far_bucket}/never: write failed"):
        objects.put_new(far_bucket / "never", b"")


def test_of_many_objects_no_more_are_read_ahead_than_are_read_at_once(bucket):
    read = []
    results = store_of(bucket).each(read.append, range(100))
    next(results)
    assert len(read) <= AT_ONCE + 1
    assert len([*results]) == 99
    assert sorted(read) == [*range(100)]


def test_a_large_object_is_read_back_in_order_and_never_mixed_with_the_next(
    bucket, object_server, monkeypatch
):
    monkeypatch.setattr(objects, "CHUNK", 1 << 20)
    payload = bytes(range(256)) * (3 << 14)  # 12 MiB: twelve chunks, and three parts to write
    objects.put(bucket / "large", payload)
    version = objects.version_of(bucket / "large")
    assert version.size == len(payload)
    assert b"".join(objects.read_chunks(bucket / "large", version)) == payload
    held = client(object_server).get_object(Bucket=BUCKET, Key=f"{bucket.key}/large")["Body"].read()
    assert held == payload
    objects.put(bucket / "large", payload[::-1])
    with pytest.raises(StorageError, match="read failed"):
        list(objects.read_chunks(bucket / "large", version))


def test_paths_of_objects_are_as_those_of_files(bucket):
    place = bucket / "cache"
    for name in ("manifest.json", "data/part-1", "data/part-2"):
        objects.put(place / name, b"x")
    assert [*place.iterdir()] == [place / "data", place / "manifest.json"]
    assert [path.name for path in (place / "data").iterdir()] == ["part-1", "part-2"]
    for name, *found in (
        ("data", True, False, True),
        ("manifest.json", False, True, True),
        ("manifest", False, False, False),
    ):
        path = place / name
        assert [path.is_dir(), path.is_file(), path.exists()] == found
    assert (place / "data" / "part-1").parent == place / "data"
    objects.remove_below(place / "data")
    objects.remove(place / "data" / "part-1")
    assert [*place.iterdir()] == [place / "manifest.json"]


SIZE = 1000


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Room for three files and a half."""
    monkeypatch.setattr(
        local_copies, "_chosen", [(str(tmp_path / "copies"), 3500 / local_copies.GIB)]
    )
    return local_copies.copies_here()


@pytest.fixture
def shards(bucket):
    """Six objects with known bytes."""
    return [stored(bucket / f"part-{number}", bytes([number]) * SIZE) for number in range(6)]


@pytest.fixture
def requests_of(bucket, object_server, monkeypatch):
    """A proxy before the server that notes what is asked, and can damage what is read."""
    faults = Faults(lambda method, _, headers: method == "GET")
    with faulty_proxy(object_server, faults) as url:
        use(monkeypatch, url)
        yield faults


def stored(path, payload):
    objects.put(path, payload)
    return path.pinned(hashlib.sha256(payload).hexdigest(), len(payload))


def content(path):
    with local_copies.open_copy(path) as source:
        return source.read()


def held(place):
    return {path.name: path.stat().st_size for path in place.shards.iterdir()}


def reads(faults):
    return [path for method, path in faults.requests if method == "GET"]


def test_an_object_is_fetched_once_whoever_wants_it_and_once_more_if_it_arrives_damaged(
    place, requests_of, shards
):
    found = []
    threads = [threading.Thread(target=lambda: found.append(content(shards[2]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [*found, content(shards[2])] == [b"\2" * SIZE] * 9
    assert len(reads(requests_of)) == 1
    requests_of.waiting[:] = ["damage+"]
    assert content(shards[1]) == b"\1" * SIZE
    assert requests_of.injected == ["damage+"]
    assert len(reads(requests_of)) == 3
    paths = iter(local_copies.fetched_ahead(shards[3:]))  # while one is read
    assert next(paths) == shards[3]
    assert [content(path) for path in paths] == [b"\4" * SIZE, b"\5" * SIZE]
    assert len(reads(requests_of)) == 6


def test_copies_stay_below_their_limit_and_the_oldest_goes_first(place, shards):
    for shard in (shards[0], shards[1], shards[2], shards[0], shards[3]):
        content(shard)
        time.sleep(0.01)  # so that the times of use differ on any file system
        assert sum(held(place).values()) <= place.limit
    assert held(place).keys() == {shards[number].sha256 for number in (2, 0, 3)}


def test_what_is_open_can_be_read_though_its_room_is_needed(place, shards):
    with local_copies.open_copy(shards[0]) as source:
        for shard in shards[1:]:
            content(shard)
        assert shards[0].sha256 not in held(place)
        assert source.read() == bytes(SIZE)


def test_an_object_with_other_bytes_than_the_manifest_says_is_never_read(place, bucket, shards):
    content(shards[3])
    (place.shards / shards[3].sha256).write_bytes(b"y" * SIZE)  # by the disk: it is fetched again
    local_copies.check_copy(shards[3])
    assert content(shards[3]) == b"\3" * SIZE
    objects.put(bucket / "part-0", b"x" * SIZE)
    objects.put(bucket / "part-1", b"short")
    objects.remove(bucket / "part-2")
    for shard, said in zip(
        shards[:3], ("not what was written", "5 bytes", "is missing"), strict=True
    ):
        with pytest.raises(CorruptionError, match=said):
            content(shard)
    assert held(place).keys() == {shards[3].sha256}


def test_what_there_is_no_room_for_is_refused_by_the_settings_name(
    place, bucket, shards, monkeypatch
):
    with pytest.raises(UsageError, match=r"Raise objects\.local_gib"):
        content(stored(bucket / "large", bytes(4000)))
    monkeypatch.setattr(local_copies.fs, "free_bytes", lambda path: 10)
    with pytest.raises(StorageError, match=r"set objects\.folder"):
        content(shards[0])


READER = """
import sys, random
from align.stages.storage.bucket import local_copies
from align.stages.storage.bucket.objects import location
folder, seed, bucket, *digests = sys.argv[1:]
local_copies.keep_copies_in(folder, 3500 / local_copies.GIB)
draw = random.Random(seed)
for _ in range(60):
    number = draw.randrange(len(digests))
    path = location(f"{bucket}/part-{number}").pinned(digests[number], 1000)
    with local_copies.open_copy(path) as source:
        assert source.read() == bytes([number]) * 1000
"""


def test_processes_that_share_too_little_room_read_whole_files_only(place, bucket, shards):
    """Three processes read six files in the room of three and a half, and remove each other's."""
    words = [str(bucket), *(shard.sha256 for shard in shards)]
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, str(place.root), str(seed), *words])
        for seed in range(3)
    ]
    assert [reader.wait(PATIENCE) for reader in readers] == [0] * 3
    assert sum(held(place).values()) <= place.limit
    assert not [name for name in held(place) if name.endswith(".tmp")]


def test_a_reservation_of_a_process_that_died_holds_no_room(place, shards):
    place.prepare()
    (place.root / ".reserved-1-dead").write_text("3400")
    assert content(shards[0]) == bytes(SIZE)
    assert not list(place.root.glob(".reserved-*"))
