"""Stage 1 in the actors of a real Ray cluster: the bytes of one process, whoever dies."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from align.pipeline.executors import ray_actors
from align.pipeline.executors.executor import Share
from align.pipeline.executors.ray_actors import RayActors, workers_of
from align.schemas.errors import ServerError, UsageError
from align.stages.storage.cache.cache_folder import CacheFolder
from support.command import start
from support.patience import PATIENCE, wait_until
from support.programs import TESTS
from support.stage_one import Silent, child, contents, run
from support.stub_reference import SlowReference

UNITS = 8  # of 120 rows
# Else Ray looks for the cluster at the address by which other machines reach this one.
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
KERNELS = {"USE_HUB_KERNELS": "1"}  # as on machines where the command does not run
AT_ONCE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}  # else a cluster takes 30 s to end


@contextmanager
def ray_cluster(folder):
    """Starts a cluster whose workers find the modules of this folder: its address and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", port]
    words += ["--num-cpus", 1, "--include-dashboard", "false", "--disable-usage-stats"]
    words += ["--object-store-memory", 128 * 1024 * 1024, "--temp-dir", folder]
    found = filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *map(str, words)],
            env=os.environ | LOOPBACK | AT_ONCE | KERNELS | {"PYTHONPATH": os.pathsep.join(found)},
            stdout=said,
            stderr=said,
        )
    try:
        wait_until(lambda: b"Ray runtime started" in (folder / "said").read_bytes())
        yield f"127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        every = descendants(psutil.Process(process.pid))
        process.terminate()
        process.wait(PATIENCE)
        for one in every:  # by their ids: another cluster may run on this machine
            with suppress(psutil.NoSuchProcess):
                one.kill()


def descendants(process, named=""):
    """The children of a process, and theirs, as far as they live and have such a name."""
    found = process.children(recursive=True)
    return [one for one in found if one.is_running() and named in name_of(one)]


def name_of(process):
    """What a process calls itself."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def cluster():
    # Not pytest's own folder: its path is too long for the names of sockets.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, ray_cluster(Path(folder)) as one:
        yield one


@pytest.fixture
def on_ray(config, cluster):
    """The config, over an actor of the cluster, of a run whose first unit is made already."""
    run(config, share=Share(1, UNITS))
    options = {"executor": "ray", "ray_address": cluster[0], "ray_workers": "1"}
    return replace(config, scoring=replace(config.scoring, **options))


def child_on_ray(config, *, fails=False, **how):
    """Starts a driver that looks for its cluster on loopback."""
    return child(config, environment=LOOPBACK, reference=SlowReference(fails=fails), **how)


def has_committed(config, units):
    """Whether so many units are committed, of a cache that is not complete yet."""
    works = CacheFolder(Path(config.cache.output)).works()
    return sum(len([*work.commits.glob("[0-9]*.json")]) for work in works) >= units


def test_it_keeps_to_the_contract(cluster, tmp_path):
    program = (
        "import sys, pathlib; from support.executor_contract import require_executor_contract; "
        "from align.pipeline.executors.ray_actors import RayActors; "
        "require_executor_contract(RayActors(sys.argv[1], '1', 0.0), pathlib.Path(sys.argv[2]))"
    )
    words = [sys.executable, "-c", program, cluster[0], str(tmp_path / "tasks")]
    found = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        words, env=os.environ | LOOPBACK | {"PYTHONPATH": found}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.long
def test_a_unit_whose_actor_is_killed_is_made_by_another(on_ray, clean, cluster):
    made = child_on_ray(on_ray)
    wait_until(lambda: has_committed(on_ray, 3))
    descendants(cluster[1], "MapWorker")[0].kill()
    made.join(PATIENCE)
    assert made.exitcode == 0
    assert contents(on_ray.cache.output) == clean


def test_what_an_actor_refuses_is_the_message_of_the_run(on_ray, cluster, tmp_path):
    stopped = child_on_ray(on_ray, fails=True, stderr=tmp_path / "said")
    wait_until(lambda: descendants(cluster[1], "MapWorker"))
    (actor,) = descendants(cluster[1], "MapWorker")
    assert actor.environ()["USE_HUB_KERNELS"] == "0"
    stopped.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert stopped.exitcode == UsageError.exit_code, said
    assert said == "This reference was told to refuse.\n"


def test_what_ray_raises_is_one_message(monkeypatch, config, tmp_path):
    def fail():
        raise RuntimeError("\x1b[31mfirst\x1b[0m\nin the middle\nlast")

    with monkeypatch.context() as failing:
        cluster = nullcontext(SimpleNamespace(nodes=fail))
        failing.setattr(ray_actors, "_connected", lambda _: cluster)
        tasks = SimpleNamespace(name="", unit="", sizes=[1], costs=[1], is_input=False)
        tasks.is_committed = lambda _: False
        with pytest.raises(ServerError, match=r"Ray gave up \(RuntimeError: first: last\)"):
            RayActors("", "", 0).run(tasks, progress=Silent(), on_done=None)
    options = {"executor": "ray", "ray_address": "127.0.0.1:1"}
    nowhere = replace(config, scoring=replace(config.scoring, **options))
    stopped = child_on_ray(nowhere, stderr=tmp_path / "said")
    stopped.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert stopped.exitcode == ServerError.exit_code, said
    assert said.startswith("--ray-address 127.0.0.1:1: ")
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [0, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_real_model_gives_the_bytes_of_one_process_and_a_cluster_of_its_own_ends_with_the_run(
    journey, tmp_path, number
):
    """Though one of its actors is killed."""
    cache = tmp_path / "cache"
    words = ("precompute-ref", journey.folder / "data.parquet", "--output", cache, "--no-mlflow")
    process = start(*words, "--executor", "ray", cwd=tmp_path)
    own = psutil.Process(process.pid)
    wait_until(lambda: descendants(own, "MapWorker"))
    every, (worker, *_) = descendants(own), descendants(own, "MapWorker")
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


def test_workers_are_one_number_or_two():
    assert [workers_of(text) for text in ("", "4", "1:8")] == [None, (4, 4), (1, 8)]
    for text in ("0", "8:1", "0:4", "1:", "two", "1:2:3", "-1:2"):
        with pytest.raises(UsageError, match="expected MIN:MAX or one number"):
            workers_of(text)
