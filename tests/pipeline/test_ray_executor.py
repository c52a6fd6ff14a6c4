"""Stage 1 in the actors of a real Ray cluster: the bytes of one process, whoever dies."""

import re
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from align.pipeline.executor import Share
from align.pipeline.ray_executor import workers_of
from align.schemas.errors import ServerError, UsageError
from align.stages.storage.cache_folder import CacheFolder
from support.command import launch, refusal, start
from support.patience import PATIENCE
from support.ray_cluster import LOOPBACK, descendants, name_of, ray_cluster, until
from support.stage_one import child, contents, run
from support.stub_reference import FarReference, SlowReference, StubReference


@pytest.fixture(scope="module")
def cluster():
    # Not pytest's own folder: its path is too long for the names of sockets.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, ray_cluster(Path(folder)) as one:
        yield one


@pytest.fixture
def on_ray(config, cluster):
    """The config, over two actors of the cluster."""
    options = {"executor": "ray", "ray_address": cluster.address, "ray_workers": "2"}
    return replace(config, scoring=replace(config.scoring, **options))


def child_on_ray(config, **how):
    """Starts a driver that looks for its cluster on loopback."""
    return child(config, environment=LOOPBACK, **how)


def has_committed(config, units):
    """Whether so many units are committed, of a cache that is not complete yet."""
    works = CacheFolder(Path(config.cache.output)).works()
    return sum(len([*work.commits.glob("[0-9]*.json")]) for work in works) >= units


def test_a_unit_whose_actor_is_killed_is_made_by_another(on_ray, clean, cluster):
    made = child_on_ray(on_ray, reference=SlowReference())
    until(lambda: has_committed(on_ray, 2))
    killed = cluster.actors()
    for actor in killed:
        actor.kill()
    made.join(PATIENCE)
    assert made.exitcode == 0
    assert killed
    assert contents(on_ray.cache.output) == clean


@pytest.mark.long
def test_a_driver_that_is_killed_leaves_its_work_to_any_executor(on_ray, config, clean):
    stopped = child_on_ray(on_ray, reference=SlowReference())
    until(lambda: has_committed(on_ray, 2))
    stopped.kill()
    stopped.join(PATIENCE)
    assert run(config, share=Share(1, 2)).whole is None
    assert run(config).tally.units < 8
    assert contents(config.cache.output) == clean


@pytest.mark.parametrize(
    ("reference", "address", "code", "said"),
    [
        (SlowReference(fails=True), "", UsageError, "^This reference was told to refuse.\n$"),
        # Its actors lack a module, as on machines without this align.
        (FarReference(), "", ServerError, "Ray gave up (.|\n)*No module named 'far_away'"),
        (StubReference(), "127.0.0.1:1", ServerError, "^--ray-address 127.0.0.1:1: "),
    ],
)
def test_what_an_actor_or_ray_refuses_is_the_message_of_the_run(
    on_ray, tmp_path, reference, address, code, said
):
    there = address or on_ray.scoring.ray_address
    config = replace(on_ray, scoring=replace(on_ray.scoring, ray_address=there))
    stopped = child_on_ray(config, reference=reference, stderr=tmp_path / "said")
    stopped.join(PATIENCE)
    found = (tmp_path / "said").read_text()
    assert stopped.exitcode == code.exit_code, found
    assert re.search(said, found)
    assert not re.search("Traceback|\x1b", found)


def test_a_real_model_gives_the_bytes_of_one_process(journey, cluster, tmp_path, monkeypatch):
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    words = ("precompute-ref", journey.folder / "data.parquet", "--output", tmp_path / "cache")
    words += ("--no-mlflow", "--executor", "ray", "--ray-address", cluster.address)
    made = launch(*words, "--ray-workers", 2, cwd=tmp_path)
    assert made.code == 0, made
    assert contents(tmp_path / "cache") == contents(journey.cache)
    assert not re.search(r"\(\w+ pid=|WARNING|INFO", made.err)  # what Ray would say


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_a_run_that_ends_leaves_nothing_of_its_own_cluster(journey, tmp_path, number):
    words = ("precompute-ref", journey.folder / "data.parquet", "--output", tmp_path / "cache")
    process = start(*words, "--no-mlflow", "--executor", "ray", cwd=tmp_path)
    own = psutil.Process(process.pid)
    until(lambda: any("MapWorker" in name_of(one) for one in descendants(own)))
    every = descendants(own)
    listening = [
        connection.laddr.ip
        for one in every
        for connection in one.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {*listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == (143 if number == signal.SIGTERM else -number), err
    until(lambda: not [one for one in every if one.is_running() and name_of(one)])


def test_without_ray_the_refusal_says_how_to_install_it(journey, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    words = ("precompute-ref", journey.folder / "data.parquet", "--output", "cache", "--no-mlflow")
    assert "pip install 'align-cached-reference[ray]'" in refusal(2, *words, "--executor", "ray")
    assert "Leave out one of the two" in refusal(2, *words, "--executor", "ray", "--part", "1/2")
    assert not Path("cache").exists() or not CacheFolder(Path("cache")).works()


def test_workers_are_one_number_or_two():
    found = {text: workers_of(text) for text in ("", "4", "1:8", "3:3")}
    assert found == {"": None, "4": (4, 4), "1:8": (1, 8), "3:3": (3, 3)}
    for text in ("0", "8:1", "0:4", ":", "1:", "two", "1:2:3", "-1:2"):
        with pytest.raises(UsageError, match="expected MIN:MAX or one number"):
            workers_of(text)
