"""Both stages with everything in a store, data, model and cache, end as they do on a disk."""

import json
import shutil

import pytest

from align.stages.storage import objects
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest
from align.stages.storage.verify_cache import verify_cache
from support.object_server import Faults, environment, faulty_proxy
from support.trainings import KILLED, Person, learned

SHORT = ("--method", "kto", "--batch-size", 8, "--max-steps", 3, "--lr", 1e-3, "--no-mlflow")


@pytest.fixture
def person(server, bucket, object_server, world, tmp_path):
    """Someone with a model and data in a bucket."""
    upload(world.model, bucket / "model")
    objects.put(bucket / "data" / world.data.paired.name, world.data.paired.read_bytes())
    return Person(server, tmp_path, environment(object_server))


def upload(folder, target):
    for path in folder.rglob("*"):
        if path.is_file():
            objects.put(target / path.relative_to(folder).as_posix(), path)


def test_both_stages_in_a_store_end_as_on_a_disk(person, bucket, world):
    make = ("--rows-per-shard", 16, "--no-mlflow")
    person.gives(
        "precompute-ref", world.data.paired, "--model", world.model, "--output", "cache", *make
    )
    said = person.gives(
        *("precompute-ref", f"{bucket}/data", "--model", f"{bucket}/model"),
        *("--output", f"{bucket}/cache", *make),
    )
    on_disk = load_manifest(CacheFolder(person.folder / "cache"))
    in_store = load_manifest(CacheFolder(bucket / "cache"))
    assert in_store.root == on_disk.root
    assert in_store.root in said.out
    assert in_store.model == f"{bucket}/model"
    names = {path.name for path in (bucket / "cache" / "data").iterdir()}
    assert names == {path.name for path in (person.folder / "cache" / "data").iterdir()}
    assert sorted(path.name for path in (bucket / "cache").iterdir()) == ["data", "manifest.json"]
    again = person.gives(
        *("precompute-ref", f"{bucket}/data", "--model", f"{bucket}/model"),
        *("--output", f"{bucket}/cache", *make),
    )
    assert "already complete" in again.out
    assert on_disk.root in person.gives("verify", f"{bucket}/cache").out
    shown = json.loads(person.gives("inspect", f"{bucket}/cache", "--json").out)
    assert shown["root"] == on_disk.root
    assert (shown["name"], shown["superseded_files"]) == ("cache", 0)
    person.gives("export", f"{bucket}/cache", "--output", "flat-of-store.parquet")
    person.gives("export", "cache", "--output", "flat.parquet")
    flat = [
        (person.folder / name).read_bytes() for name in ("flat.parquet", "flat-of-store.parquet")
    ]
    assert flat[0] == flat[1]
    person.gives("train", "--cache", "cache", "--output", "run", *SHORT)
    shutil.rmtree(person.home / "objects")
    person.gives("train", "--cache", f"{bucket}/cache", "--output", "run-of-store", *SHORT)
    assert learned(person.folder / "run") == learned(person.folder / "run-of-store")
    card = (person.folder / "run-of-store" / "model" / "README.md").read_text()
    assert f"{bucket}/model" in card


MAKE = ("--rows-per-shard", 16, "--no-mlflow")
KILLS = [
    "plan.before_link",
    "plan.after_link",
    "shard.before_rename",
    "shard.after_rename",
    "commit.before_link",
    "commit.after_link",
    "manifest.before_rename",
    "manifest.after_rename",
    "gc.started",
    "gc.forgotten",
]


@pytest.fixture(scope="module")
def root_on_disk(server, world, tmp_path_factory):
    """The root of the cache on a disk."""
    folder = tmp_path_factory.mktemp("disk")
    made = ("--model", world.model, "--output", "cache", *MAKE)
    Person(server, folder, {}).gives("precompute-ref", world.data.paired, *made)
    return load_manifest(CacheFolder(folder / "cache")).root


def making(world, bucket):
    """The words that make the cache in a store."""
    made = ("--model", world.model, "--output", f"{bucket}/cache", *MAKE)
    return ("precompute-ref", world.data.paired, *made)


def require_clean(bucket, root):
    """The cache is whole, and nothing but it is left."""
    folder = CacheFolder(bucket / "cache")
    manifest = load_manifest(folder)
    assert manifest.root == root
    verify_cache(folder)
    assert sorted(path.name for path in (bucket / "cache").iterdir()) == ["data", "manifest.json"]
    named = {shard.file for shard in manifest.shards}
    assert {path.name for path in folder.data.iterdir()} == named


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(["commit.after_link=kill@2"], id="a commit"),
        pytest.param(
            [f"{name}=kill@{visit}" for name in KILLS for visit in (1, 3)],
            id="everywhere",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_cache_whose_maker_is_killed_ends_as_one_on_a_disk(
    person, bucket, world, root_on_disk, kills
):
    """Each time it goes on on a machine that has nothing of the one before."""
    for number, failpoints in enumerate(kills):
        place = bucket / str(number)
        done = person.tries(*making(world, place), failpoints=failpoints)
        was_killed = done.code == KILLED
        assert was_killed or failpoints.endswith("@3"), done
        shutil.rmtree(person.home)
        person.gives(*making(world, place))
        require_clean(place, root_on_disk)


def test_a_store_that_loses_answers_gets_the_same_cache(
    person, bucket, object_server, world, root_on_disk
):
    """A refusal, a failure or silence for each conditional write, after it was carried out."""
    faults = Faults(lambda method, _, headers: method == "PUT" and "If-None-Match" in headers)
    faults.waiting[:] = ["412+", "409", "503+", "drop+", "hang+", "500+"]
    with faulty_proxy(object_server, faults) as url:
        far = {**environment(url), "AWS_TIMEOUT": "1s"}
        Person(person.server, person.folder, far).gives(*making(world, bucket))
    assert len(faults.injected) == 6
    require_clean(bucket, root_on_disk)


def test_two_machines_that_make_one_cache_at_once_end_in_one(person, bucket, world, root_on_disk):
    """Neither knows of the other: they share no folder and no lock."""
    both = []
    for name in ("one", "other"):
        (person.folder / name).mkdir()
        machine = Person(person.server, person.folder / name, person.environment)
        both.append(machine.starts(*making(world, bucket)))
    answers = [one.answer() for one in both]
    assert [answer.code for answer in answers] == [0, 0], answers
    require_clean(bucket, root_on_disk)


RUN = (
    *("--method", "kto", "--batch-size", 8, "--max-steps", 6, "--lr", 1e-3, "--no-mlflow"),
    *("--eval-fraction", 0.1, "--eval-every", 3, "--save-every", 2),
)


def test_a_run_in_a_store_resumes_on_a_machine_that_has_nothing(person, bucket, world):
    """Killed after its second checkpoint; nothing is lost but the steps since."""
    made = ("--model", world.model, "--output", "cache", *MAKE)
    person.gives("precompute-ref", world.data.paired, *made)
    person.gives("train", "--cache", "cache", "--output", "run", *RUN)
    stored = ("train", "--cache", "cache", "--output", f"{bucket}/run", *RUN)
    assert person.tries(*stored, failpoints="step.started=kill@6").code == KILLED
    names = {path.name for path in (bucket / "run" / "checkpoints").iterdir()}
    assert names == {"files", "step-00000002.json", "step-00000004.json"}
    shutil.rmtree(person.home)
    refused = person.tries(*stored)
    assert refused.code == 2
    assert f"{bucket}/run holds a run" in refused.err
    assert "continuing after step 4" in person.gives(*stored, "--resume", "auto").err
    assert left_by(bucket / "run", "metrics.jsonl") == learned(person.folder / "run")
    model = objects.read(bucket / "run" / "model" / "model.safetensors")
    assert model == (person.folder / "run" / "model" / "model.safetensors").read_bytes()
    held = {path.name for path in (bucket / "run").iterdir()}
    assert {"_align", "checkpoints", "config.yaml", "evaluations", "report.html"} <= held
    shutil.rmtree(person.home)
    assert "6 steps done already" in person.gives(*stored, "--resume", "auto").out
    again = ("train", "--cache", "cache", "--model", f"{bucket}/run/model", "--output", "next")
    person.gives(*again, *RUN, "--set", "train.other_reference=true")


def left_by(run, name):
    """The lines of a stored run's metrics, but what depends on the machine and its load."""
    lines = [json.loads(line) for line in objects.read(run / name).splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith(OF_TODAY)}
        for line in lines
    ]


OF_TODAY = ("time", "speed/", "memory/")


def test_checkpoints_that_a_run_removed_leave_the_store_as_well(person, bucket, world):
    made = ("--model", world.model, "--output", "cache", *MAKE)
    person.gives("precompute-ref", world.data.paired, *made)
    person.gives("train", "--cache", "cache", "--output", f"{bucket}/run", *RUN, "--keep-last", 1)
    checkpoints = bucket / "run" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"files", "step-00000006.json"}
    record = json.loads(objects.read(checkpoints / "step-00000006.json"))
    held = {path.name for path in (checkpoints / "files").iterdir()}
    assert held == {file["sha256"] for file in record["files"]}


def test_a_cache_in_a_store_grows_is_reused_and_forgets(person, bucket, world, root_on_disk):
    """What it held before stays until gc; a cache elsewhere copies its scores."""
    person.gives(*making(world, bucket))
    grown = person.gives(*making(world, bucket), "--kl-pairs", 2)
    assert "reused 240 of" in grown.out, grown
    root = load_manifest(CacheFolder(bucket / "cache")).root
    assert root != root_on_disk
    assert [path.name for path in (bucket / "cache" / "_align" / "roots").iterdir()] == [
        f"{root_on_disk[:16]}.json"
    ]
    made = ("precompute-ref", world.data.paired, "--model", world.model, *MAKE)
    reused = person.gives(*made, "--output", "disk", "--reuse", f"{bucket}/cache")
    assert "reused 240 of 240" in reused.out, reused
    assert load_manifest(CacheFolder(person.folder / "disk")).root == root_on_disk
    assert root_on_disk in person.gives("gc", f"{bucket}/cache", "--yes").out
    require_clean(bucket, root)


def test_parts_on_machines_that_share_nothing_but_the_store_make_one_cache(
    person, bucket, world, root_on_disk
):
    """Each tokenizes the rows for itself; the last to end completes the cache."""
    for part in ("2/2", "1/2"):
        (person.folder / part[0]).mkdir()
        machine = Person(person.server, person.folder / part[0], person.environment)
        said = machine.gives(*making(world, bucket), "--part", part).out
        assert (root_on_disk in said) == (part == "1/2"), said
    require_clean(bucket, root_on_disk)
