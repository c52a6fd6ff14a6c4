"""Objects of a real S3 server: writes, races, answers that are lost, and copies on a disk."""

import hashlib
import json

import pytest

from align.schemas.errors import CorruptionError, PathError, StorageError, UsageError
from align.stages.storage import remote as remotes
from align.stages.storage.copies import damaged_objects, fetch_cache, fetch_folder
from align.stages.storage.disk.digests import user_folder
from align.stages.storage.locations import is_remote, origin_of
from align.stages.storage.remote import Remote
from support.at_once import at_the_same_time
from support.object_server import BUCKET, Faults, client, faulty_proxy, use

ROUNDS = 3


@pytest.fixture
def place(bucket, tmp_path, monkeypatch):
    """An empty place in the bucket; copies go to a folder of this test."""
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    return Remote(bucket)


@pytest.fixture
def faults(place, bucket, object_server, monkeypatch):
    """What a proxy before the server does to requests."""
    faults = Faults(lambda *_: True)
    with faulty_proxy(object_server, faults) as url:
        use(monkeypatch, url, AWS_TIMEOUT="0.3s")
        yield faults


def test_of_twelve_who_create_one_object_one_wins(place):
    for number in range(ROUNDS):
        won = []

        def write(writer, name=f"race-{number}", won=won):
            if place.put_new(name, b"%d" % writer):
                won.append(writer)

        at_the_same_time(write)
        assert won == [int(place.get(f"race-{number}"))]


# Before or after (+) the server did its work: refusals of three kinds, no answer, a late one.
@pytest.mark.parametrize("fault", ["412+", "409", "409+", "503", "503+", "drop", "drop+", "hang+"])
def test_an_object_whose_answer_is_lost_is_neither_lost_nor_made_twice(bucket, faults, fault):
    faults.applies = lambda method, _, headers: method == "PUT" and "If-None-Match" in headers
    place = Remote(bucket)
    faults.waiting[:] = [fault]
    assert place.put_new("lost", b"ours")
    assert faults.injected == [fault]
    assert place.get("lost") == b"ours"
    assert place.put_new("lost", b"ours"), "a retry of one's own"
    faults.waiting[:] = [fault]
    assert not place.put_new("lost", b"theirs")
    assert place.get("lost") == b"ours"


def test_objects_are_listed_by_their_names_and_removed(place):
    for name in ("a", "b/c", "b/d/e", "bc"):
        place.put(name, name.encode())
    assert place.list().keys() == {"a", "b/c", "b/d/e", "bc"}
    assert place.list("b").keys() == {"b/c", "b/d/e"}
    assert (place.version("a").size, place.version("b")) == (1, None)
    place.delete(["a", "b/c", "never"])
    place.delete([])
    assert place.list().keys() == {"b/d/e", "bc"}
    assert place.get("a") is None


def test_a_large_object_is_read_in_order_and_never_mixed_with_the_next(
    place, bucket, object_server, monkeypatch, tmp_path
):
    monkeypatch.setattr(remotes, "CHUNK", 1 << 20)
    payload = bytes(range(256)) * (3 << 14)  # 12 MiB: twelve ranges
    (tmp_path / "large").write_bytes(payload)
    place.put("large", tmp_path / "large")
    assert b"".join(place.chunks("large")) == payload
    held = (
        client(object_server)
        .get_object(Bucket=BUCKET, Key=f"{bucket.rpartition('/')[2]}/large")["Body"]
        .read()
    )
    assert held == payload
    chunks = place.chunks("large")
    next(chunks)
    place.put("large", payload[::-1])
    with pytest.raises(StorageError, match=f"{bucket}/large"):
        list(chunks)


def test_a_missing_bucket_is_not_a_missing_object(place):
    elsewhere = Remote("s3://elsewhere/none")
    for ask in (elsewhere.get, elsewhere.list, lambda name: elsewhere.put_new(name, b"")):
        with pytest.raises(PathError, match="elsewhere"):
            ask("name")


@pytest.mark.parametrize(
    "text",
    [
        "http://host/key",
        "s3://me:canary-password@bucket/key",
        "s3://bucket/key?X-Amz-Signature=canary",
        "s3://bucket/key#part",
        "s3:///key",
        "s3://bucket/../other",
        "az://container/key",  # without AZURE_STORAGE_ACCOUNT_NAME
    ],
)
def test_a_location_is_a_bucket_and_a_key_and_nothing_else(text, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    assert is_remote(text)
    with pytest.raises(UsageError):
        Remote(text)


def test_one_place_has_one_name_in_each_store(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for scheme in ("s3", "az"):
        place = Remote(f"{scheme}://bucket//a/b/")
        assert (place.url, place.name, place.at("c")) == (
            f"{scheme}://bucket/a/b",
            "b",
            f"{scheme}://bucket/a/b/c",
        )
    assert not is_remote("s3/bucket")


def gets(faults):
    return [path.rpartition("/")[2] for method, path in faults.requests if method == "GET"]


def test_a_folder_is_fetched_once_for_each_version_of_its_objects(place, bucket, faults):
    for name in ("config.json", "code/model.py", "weights.bin"):
        place.put(f"model/{name}", name.encode())

    def choose(names):
        return [name for name in names if not name.endswith(".bin")]

    first = fetch_folder(f"{bucket}/model/", choose)
    assert first.name == "model"
    assert {path.name for path in first.rglob("*") if path.is_file()} == {"config.json", "model.py"}
    assert origin_of(str(first)) == f"{bucket}/model"
    assert origin_of(str(first / "code" / "model.py")) == f"{bucket}/model/code/model.py"
    assert origin_of("/models/mine") == "/models/mine"
    assert first.parent.parent.stat().st_mode & 0o777 == 0o700
    faults.requests.clear()
    assert fetch_folder(f"{bucket}/model", choose) == first
    assert "model.py" not in gets(faults)
    place.put("model/config.json", b"{}")
    second = fetch_folder(f"{bucket}/model", choose)
    assert (second / "config.json").read_bytes() == b"{}"
    assert (first / "config.json").read_bytes() == b"config.json"
    file = fetch_folder(f"{bucket}/model/config.json", choose)
    assert (file.name, origin_of(str(file))) == ("config.json", f"{bucket}/model/config.json")
    with pytest.raises(UsageError, match=f"{bucket}/never"):
        fetch_folder(f"{bucket}/never", choose)


def put_cache(place, shards):
    """Something with the files of a cache: a manifest that names shards by their digests."""
    listed = []
    for number, payload in enumerate(shards):
        place.put(f"cache/data/part-{number}", payload)
        sha256 = hashlib.sha256(payload).hexdigest()
        listed.append({"file": f"part-{number}", "sha256": sha256})
    manifest = {"shards": listed, "rejected": None}
    place.put("cache/manifest.json", json.dumps(manifest).encode())


def test_a_cache_is_fetched_shard_by_shard_and_its_manifest_last(place, bucket, faults):
    with pytest.raises(UsageError, match=rf"{bucket}/cache .*manifest\.json"):
        fetch_cache(f"{bucket}/cache")
    shards = [bytes([number]) * 1000 for number in range(20)]
    put_cache(place, shards)
    faults.applies = lambda method, path, _: method == "GET" and path.endswith("part-7")
    faults.waiting[:] = ["damage+", "damage+"]
    with pytest.raises(CorruptionError, match=f"{bucket}/cache/data/part-7"):
        fetch_cache(f"{bucket}/cache")
    copies = bucket_copies(place)
    assert not [*copies.rglob("manifest.json")]
    faults.requests.clear()
    faults.waiting[:] = ["damage+"]  # it is fetched again
    folder = fetch_cache(f"{bucket}/cache")
    assert (folder / "manifest.json").exists()
    names = [f"part-{number}" for number in range(20)]
    assert [(folder / "data" / name).read_bytes() for name in names] == shards
    assert gets(faults).count("part-7") == 2
    faults.requests.clear()
    assert fetch_cache(f"{bucket}/cache") == folder
    assert gets(faults) == ["manifest.json"]
    assert damaged_objects(f"{bucket}/cache") == []
    place.put("cache/data/part-2", b"other bytes")
    place.delete(["cache/data/part-5"])
    second, fifth = damaged_objects(f"{bucket}/cache")
    assert f"{bucket}/cache/data/part-2" in second
    assert f"{bucket}/cache/data/part-5" in fifth
    put_cache(place, shards[:3])
    assert fetch_cache(f"{bucket}/cache") != folder


def bucket_copies(place):
    return user_folder() / "remote"


def test_processes_that_want_one_cache_fetch_it_once(place, bucket, faults):
    put_cache(place, [b"shard"] * 3)
    found = []
    at_the_same_time(lambda _: found.append(fetch_cache(f"{bucket}/cache")))
    assert len({*found}) == 1
    assert gets(faults).count("part-1") == 1
