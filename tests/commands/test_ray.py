"""Stage 1 in the actors of a real Ray cluster: the bytes of one process, whoever dies."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from align.pipeline.parts import Part
from align.schemas.errors import ServerError, UsageError
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import unfinished_work
from support.command import said_by
from support.deadly import Held, refused
from support.patience import PATIENCE, wait_until
from support.ray_cluster import FOUND, LOOPBACK, descendants, name_of, two_nodes
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


def child_on_ray(config, scoring, **how):
    """Starts a driver that looks for its cluster on loopback."""
    reference = StubReference(scoring=scoring)
    return child(config, environment=LOOPBACK, reference=reference, **how)


def committed(config):
    """How many shards are committed of a cache that is not complete yet."""
    (work,) = unfinished_work(Cache(Path(config.cache.output)))
    return len([*work.commits.glob("[0-9]*.json")])


def test_an_actors_refusal_is_the_runs_message(on_ray, cluster, tmp_path):
    alone = replace(on_ray, scoring=replace(on_ray.scoring, ray_workers=1))
    stopped = child_on_ray(alone, refused, stderr=tmp_path / "said")
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
os.environ["RAY_USAGE_STATS_ENABLED"] = "1"
try:
    for item, _ in run_on_ray(Squares(kills=7), range(9), "shard", sys.argv[1], 2, 0.0):
        made.append(item)
except ServerError as error:
    print(sorted(made), error)
assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"
"""


def test_an_item_at_which_three_actors_die_is_named_and_ends_the_run(cluster):
    said = said_by(sys.executable, "-c", KILLS, cluster.address, cwd=TESTS, **LOOPBACK)
    assert str([0, 1, 2, 3, 4, 5, 6, 8]) in said
    assert "shard 7" in said


def test_a_cluster_that_cannot_be_joined_is_named(config, tmp_path):
    options = {"executor": "ray", "ray_address": "127.0.0.1:1"}
    nowhere = replace(config, scoring=replace(config.scoring, **options))
    stopped = child_on_ray(nowhere, refused, stderr=tmp_path / "said")
    stopped.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert stopped.exitcode == ServerError.exit_code, said
    assert "--ray-address 127.0.0.1:1" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [0, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_cluster_of_its_own_ends_with_the_run(config, clean, tmp_path, number):
    """Though its actor is killed, or the run itself."""
    options = {"executor": "ray", "ray_workers": 1}
    go_on = tmp_path / "go-on"
    process = child(
        replace(config, scoring=replace(config.scoring, **options)),
        reference=StubReference(scoring=Held(go_on)),
        environment={"PYTHONPATH": FOUND},
    )
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
        os.kill(process.pid, number)
    else:
        worker.kill()
    go_on.touch()
    process.join(PATIENCE)
    assert process.exitcode == -number
    wait_until(lambda: not [one for one in every if one.is_running() and name_of(one)])
    assert number or contents(config.cache.output) == clean


def test_a_stopped_run_and_a_killed_node_change_no_byte(on_ray, clean, cluster, tmp_path):
    """The last of these tests: the cluster has one node from here on."""
    held = Held(tmp_path / "go-on")
    alone = replace(on_ray, scoring=replace(on_ray.scoring, ray_workers=1))
    stopped = child_on_ray(alone, held, stderr=tmp_path / "said")
    wait_until(lambda: committed(on_ray) > 1)
    os.kill(stopped.pid, signal.SIGTERM)  # whose handler Ray replaces by its own
    stopped.join(PATIENCE)
    assert stopped.exitcode == 128 + signal.SIGTERM
    assert "completions" in (tmp_path / "said").read_text()
    wait_until(lambda: not cluster.actors())
    made, before = child_on_ray(on_ray, held), committed(on_ray)
    wait_until(lambda: committed(on_ray) > before)
    cluster.kill_second_node()
    (tmp_path / "go-on").touch()
    made.join(PATIENCE)
    assert made.exitcode == 0
    assert contents(on_ray.cache.output) == clean
