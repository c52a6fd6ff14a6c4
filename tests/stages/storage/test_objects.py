"""Objects of a real S3 server: conditional writes, races, and answers that are lost on the way."""

import threading

import pytest

from align.schemas.errors import LockedError, PathError, StorageError, UsageError
from align.stages.storage import objects, places
from align.stages.storage.objects import ObjectPath, location
from support.object_server import BUCKET, Faults, client, faulty_proxy, use

WRITERS, ROUNDS = 12, 10


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


def at_the_same_time(work):
    """Calls the work in threads that start together, with their numbers."""
    start = threading.Barrier(WRITERS)

    def begin(writer):
        start.wait()
        work(writer)

    threads = [threading.Thread(target=begin, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_of_twelve_writers_one_wins_in_each_round(bucket):
    """Each reads back the same bytes, which are the winner's."""
    for number in range(ROUNDS):
        path, won = bucket / f"race/{number}.json", []

        def write(writer, path=path, won=won):
            if places.put_if_absent(path, b"%d" % writer, label="commit"):
                won.append(writer)

        at_the_same_time(write)
        assert won == [int(objects.read(path))]


def test_of_those_who_replace_one_object_all_but_the_first_are_refused(bucket):
    path, refused = bucket / "grown", []
    objects.put(path, b"first")

    def replace(writer):
        try:
            places.replace_known(path, b"%d" % writer, known=b"first", label="manifest")
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
    is_there = {
        name: ((place / name).is_dir(), (place / name).is_file(), (place / name).exists())
        for name in ("data", "manifest.json", "manifest")
    }
    assert is_there == {
        "data": (True, False, True),
        "manifest.json": (False, True, True),
        "manifest": (False, False, False),
    }
    assert (place / "data" / "part-1").parent == place / "data"
    objects.remove_below(place / "data")
    objects.remove(place / "data" / "part-1")
    assert [*place.iterdir()] == [place / "manifest.json"]


def test_a_missing_object_and_a_missing_bucket_are_told_apart(bucket):
    with pytest.raises(PathError, match=f"{bucket}/none: there is no such object"):
        objects.read(bucket / "none")
    elsewhere = ObjectPath("s3", "elsewhere", "none")
    for ask in (objects.read, lambda path: objects.put_new(path, b"")):
        with pytest.raises(PathError, match="there is no bucket 'elsewhere'"):
            ask(elsewhere)


def test_a_location_is_a_bucket_and_a_key_and_nothing_else(tmp_path):
    for text in (
        "http://host/key",
        "s3://me:canary-password@bucket/key",
        "s3://bucket/key?X-Amz-Signature=canary",
        "s3://bucket/key#part",
        "s3:///key",
        "s3://bucket/../other",
    ):
        with pytest.raises(UsageError):
            location(text)
    assert location(str(tmp_path)) == tmp_path
    assert location("s3/bucket") == location("s3") / "bucket"
    for scheme in ("s3", "gs", "az"):
        assert location(f"{scheme}://bucket//a/b/") == ObjectPath(scheme, "bucket", "a/b")
