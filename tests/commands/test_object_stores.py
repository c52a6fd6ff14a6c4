"""Both stages with everything in a store, data, model and cache, end as they do on a disk."""

import json
import shutil
from dataclasses import replace

import pytest

from align.pipeline.precompute.verify import verify_files
from align.stages.storage.cache import Cache
from align.stages.storage.copies import damaged_objects, fetch_cache
from align.stages.storage.remote import Remote
from support.object_server import environment
from support.trainings import KILLED, Person, learned

MAKE = ("--shards", 8, "--no-mlflow")
RUN = (
    *("--method", "kto", "--batch-size", 8, "--max-steps", 6, "--lr", 1e-3, "--no-mlflow"),
    *("--eval-fraction", 0.1, "--eval-every", 3, "--save-every", 2),
)


@pytest.fixture
def person(server, bucket, object_server, tmp_path):
    """Someone who knows the way to the bucket."""
    return Person(server, tmp_path, environment(object_server))


def making(world, output):
    """The words that make a cache of local data."""
    return ("precompute-ref", world.data.paired, "--model", world.model, "--output", output, *MAKE)


@pytest.fixture(scope="module")
def cache_on_disk(server, world, tmp_path_factory):
    """A cache on a disk."""
    folder = tmp_path_factory.mktemp("disk")
    Person(server, folder, {}).gives(*making(world, "cache"))
    return Cache(folder / "cache")


def require_clean(place, root):
    """The cache is whole, and nothing but it is left."""
    assert damaged_objects(f"{place}/cache") == []
    manifest = verify_files(Cache(fetch_cache(f"{place}/cache")))
    assert manifest.root == root
    named = {f"data/{shard.file}" for shard in manifest.shards}
    assert Remote(f"{place}/cache").list().keys() == {*named, "manifest.json"}


def test_both_stages_in_a_store_end_as_on_a_disk(person, bucket, world, cache_on_disk):
    """Killed after its second checkpoint; nothing is lost but the steps since."""
    place = Remote(bucket)
    for path in world.model.rglob("*"):
        if path.is_file():
            place.put(f"model/{path.relative_to(world.model).as_posix()}", path)
    place.put(f"data/{world.data.paired.name}", world.data.paired)
    made = (
        *("precompute-ref", f"{bucket}/data", "--model", f"{bucket}/model"),
        *("--output", f"{bucket}/cache", *MAKE),
    )
    root = cache_on_disk.manifest().root
    assert root in person.gives(*made).out
    require_clean(bucket, root)
    assert Cache(fetch_cache(f"{bucket}/cache")).manifest().model == f"{bucket}/model"
    assert "already complete" in person.gives(*made).out
    assert root in person.gives("verify", f"{bucket}/cache").out
    assert json.loads(person.gives("inspect", f"{bucket}/cache", "--json").out)["root"] == root
    flat = []
    for number, cache in enumerate((cache_on_disk.root, f"{bucket}/cache")):
        person.gives("export", cache, "--output", f"{number}.parquet")
        flat.append((person.folder / f"{number}.parquet").read_bytes())
    assert flat[0] == flat[1]

    person.gives("train", "--cache", cache_on_disk.root, "--output", "run", *RUN)
    stored = ("train", "--cache", f"{bucket}/cache", "--output", f"{bucket}/run", *RUN)
    assert person.tries(*stored, faults="before:update=kill@6").code == KILLED
    stored_steps = lambda: {name.split("/")[2] for name in place.list("run/checkpoints")}  # noqa: E731
    assert stored_steps() == {"step-00000002", "step-00000004"}
    shutil.rmtree(person.home)
    refused = person.tries(*stored)
    assert refused.code == 2
    assert all(word in refused.err for word in (f"{bucket}/run", "--resume auto", "--output"))
    resumed = person.gives(*stored, "--resume", "auto", "--keep-last", 1)
    assert "after step 4" in resumed.err
    copy = person.folder / "copy"
    copy.mkdir()
    for name in ("metrics.jsonl", "model/model.safetensors", "model/README.md"):
        (copy / name.rpartition("/")[2]).write_bytes(place.get(f"run/{name}"))
    assert learned(copy) == learned(person.folder / "run")
    model = person.folder / "run" / "model" / "model.safetensors"
    assert (copy / model.name).read_bytes() == model.read_bytes()
    assert f"{bucket}/model" in (copy / "README.md").read_text()
    whole = person.folder / "run" / "checkpoints" / "step-00000006"
    names = {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
    prefix = "run/checkpoints/step-00000006/"
    assert {name.removeprefix(prefix) for name in place.list("run/checkpoints")} == names
    shutil.rmtree(person.home)
    assert "6 steps done already" in person.gives(*stored, "--resume", "auto").out
    again = ("train", "--cache", cache_on_disk.root, "--model", f"{bucket}/run/model")
    one_step = (*RUN, "--max-steps", 1, "--set", "train.other_reference=true")
    person.gives(*again, "--output", "next", *one_step)


def test_a_killed_cache_in_a_store_ends_as_on_a_disk(person, bucket, world, cache_on_disk):
    """Each time it goes on on a machine that has nothing of the one before."""
    words = making(world, f"{bucket}/cache")
    for fault in ("after:put:*/commits/*.json=kill@2", "before:put:*/manifest.json=kill"):
        assert person.tries(*words, faults=fault).code == KILLED
        shutil.rmtree(person.home)
    person.gives(*words)
    require_clean(bucket, cache_on_disk.manifest().root)


@pytest.mark.parametrize("parts", [(), ("2/2", "1/2")])
def test_machines_share_nothing_but_the_store(person, bucket, world, cache_on_disk, parts):
    """Two of which neither knows of the other, or parts, the last of which completes the cache."""
    machines, answers = [], []
    for number in range(2):
        (person.folder / str(number)).mkdir()
        more = ("--part", parts[number]) if parts else ()
        machine = replace(person, folder=person.folder / str(number))
        machines.append(machine.starts(*making(world, f"{bucket}/cache"), *more))
        if parts:
            answers.append(machines.pop().answer())
    answers += [machine.answer() for machine in machines]
    assert [answer.code for answer in answers] == [0, 0], answers
    require_clean(bucket, cache_on_disk.manifest().root)


def test_a_cache_in_a_store_is_reused_and_never_changes(person, bucket, world, cache_on_disk):
    """A cache elsewhere copies its scores."""
    root, made = cache_on_disk.manifest().root, making(world, f"{bucket}/cache")
    person.gives(*made)
    refused = person.tries(*made, "--kl-pairs", 2)
    assert (refused.code, "cache.kl_pairs: the cache has 1, now 2" in refused.err) == (4, True)
    require_clean(bucket, root)
    reused = person.gives(*making(world, "disk"), "--reuse", f"{bucket}/cache")
    assert "reused 240 of 240" in reused.out, reused
    assert Cache(person.folder / "disk").manifest().root == root
