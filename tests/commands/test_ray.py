"""Stage 1 in the actors of a real Ray cluster: the bytes of one process, whoever dies."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from align.pipeline.parts import Part
from align.schemas.errors import ServerError, UsageError
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import unfinished_work
from support.command import refusal, start
from support.deadly import refused, slow
from support.patience import PATIENCE, wait_until
from support.ray_cluster import LOOPBACK, descendants, name_of, two_nodes
from support.rooms import TESTS
from support.stage_one import child, contents, run
from support.stub_reference import StubReference

SHARDS = 8  # of 120 rows


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as one:
        yield one


@pytest.fixture
def on_ray(config, cluster):
    """The config, over two actors of the cluster, of a run whose first shard is made already."""
    run(config, part=Part(1, SHARDS))
    options = {"executor": "ray", "ray_address": cluster.address, "ray_workers": 2}
    return replace(config, scoring=replace(config.scoring, **options))


def child_on_ray(config, *, scoring=slow, **how):
    """Starts a driver that looks for its cluster on loopback."""
    reference = StubReference(scoring=scoring)
    return child(config, environment=LOOPBACK, reference=reference, **how)


def has_committed(config, shards):
    """Whether so many shards are committed, of a cache that is not complete yet."""
    works = unfinished_work(Cache(Path(config.cache.output)))
    return sum(len([*work.commits.glob("[0-9]*.json")]) for work in works) >= shards


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_stopped_run_leaves_the_cluster_as_it_was(on_ray, clean, cluster, tmp_path, number):
    stopped = child_on_ray(on_ray, stderr=tmp_path / "said")
    wait_until(lambda: has_committed(on_ray, 3))
    os.kill(stopped.pid, number)
    stopped.join(PATIENCE)
    assert stopped.exitcode == 128 + number
    assert "completions" in (tmp_path / "said").read_text()
    wait_until(lambda: not cluster.actors())
    assert (
        run(replace(on_ray, scoring=replace(on_ray.scoring, executor="inline"))).counts.shards < 6
    )
    assert contents(on_ray.cache.output) == clean


def test_what_an_actor_refuses_is_the_message_of_the_run(on_ray, cluster, tmp_path):
    stopped = child_on_ray(on_ray, scoring=refused, stderr=tmp_path / "said")
    wait_until(cluster.actors)
    assert {actor.environ()["USE_HUB_KERNELS"] for actor in cluster.actors()} == {"0"}
    stopped.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert stopped.exitcode == UsageError.exit_code, said
    assert said == "This reference was told to refuse.\n"


KILLS = """
import os, sys
from align.pipeline.ray_actors import run_on_ray
from align.schemas.errors import ServerError
from support.deadly import Squares

made = []
try:
    for item, _ in run_on_ray(Squares(kills=7), range(9), "shard", sys.argv[1], 2, 0.0):
        made.append(item)
except ServerError as error:
    print(sorted(made), error)
"""


def test_an_item_at_which_three_actors_die_is_named_and_ends_the_run(cluster):
    found = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", KILLS, cluster.address],
        env=os.environ | LOOPBACK | {"PYTHONPATH": found},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str([0, 1, 2, 3, 4, 5, 6, 8]) in done.stdout, done.stderr
    assert "shard 7" in done.stdout


def test_a_cluster_that_cannot_be_joined_is_named(config, tmp_path):
    options = {"executor": "ray", "ray_address": "127.0.0.1:1"}
    nowhere = replace(config, scoring=replace(config.scoring, **options))
    stopped = child_on_ray(nowhere, stderr=tmp_path / "said")
    stopped.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert stopped.exitcode == ServerError.exit_code, said
    assert "--ray-address 127.0.0.1:1" in said
    assert "Traceback" not in said


def test_ray_has_no_parts_and_a_number_of_actors(world, tmp_path):
    words = ("precompute-ref", world.data.paired, "--model", world.model, "--output", tmp_path)
    on_ray = (*words, "--executor", "ray", "--no-mlflow")
    assert "--executor" in refusal(2, *on_ray, "--part", "1/2")
    assert "ray_workers" in refusal(2, *on_ray, "--set", "scoring.ray_workers=some")


@pytest.mark.parametrize("number", [0, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_cluster_of_its_own_ends_with_the_run(journey, tmp_path, number):
    """Though one of its actors is killed."""
    cache = tmp_path / "cache"
    words = ("precompute-ref", journey.folder / "data.parquet", "--output", cache, "--no-mlflow")
    process = start(*words, "--executor", "ray", cwd=tmp_path)
    own = psutil.Process(process.pid)
    wait_until(lambda: descendants(own, "_Actor"))
    every, (worker, *_) = descendants(own), descendants(own, "_Actor")
    assert worker.environ()["RAY_AUTH_MODE"] == "token"  # no other user can join it
    assert len(worker.environ()["RAY_AUTH_TOKEN"]) == 64
    listening = {
        connection.laddr.ip
        for one in every
        for connection in one.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    if number:
        process.send_signal(number)
    else:
        worker.kill()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -number, err
    wait_until(lambda: not [one for one in every if one.is_running() and name_of(one)])
    assert number or contents(cache) == contents(journey.cache)


def test_a_node_that_is_killed_in_the_middle_changes_no_byte(on_ray, clean, cluster):
    """The last of these tests: the cluster has one node from here on."""
    made = child_on_ray(on_ray)
    wait_until(lambda: has_committed(on_ray, 3))
    cluster.kill_second_node()
    made.join(PATIENCE)
    assert made.exitcode == 0
    assert contents(on_ray.cache.output) == clean
