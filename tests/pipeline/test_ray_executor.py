"""Stage 1 in the actors of a real Ray cluster: the bytes of one process, whoever dies."""

import re
import signal
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from align.pipeline.executor import Share
from align.pipeline.precompute_plan import open_job, preparation_of
from align.pipeline.prepare_tasks import ArrangeTasks, EncodeTasks
from align.pipeline.ray_executor import RayActors, workers_of
from align.schemas.errors import ServerError, UsageError
from align.stages.data import input_files
from align.stages.pairing import key_ranges
from align.stages.pairing.ring import complete_ring
from align.stages.storage.cache_folder import CacheFolder
from align.stages.tracking.progress import NoProgress
from support.command import launch, refusal, start
from support.patience import PATIENCE
from support.ray_cluster import LOOPBACK, descendants, name_of, ray_cluster, until
from support.stage_one import child, contents, run
from support.stub_reference import FarReference, SlowReference, StubReference

UNITS = 8  # of 120 rows, 16 in each


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


class Commits:
    """Looks at every commit there ever is in a cache folder, and at the file it names."""

    def __init__(self, output):
        self._folder = CacheFolder(Path(output))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.files = {}  # name -> every file that had this name

    def _look(self):
        while not self._over.wait(0.005):
            for work in self._folder.works():
                for path in work.commits.glob("[0-9]*.json"):
                    try:
                        found = path.stat()
                    except FileNotFoundError:  # the cache is complete
                        continue
                    known = self.files.setdefault(path.name, set())
                    known.add((found.st_ino, found.st_mtime_ns))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray, in this process
def test_actors_prepare_what_one_process_prepares(on_ray, clean, cluster, monkeypatch):
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(input_files, "LEAST_SLICE", 1000)
    monkeypatch.setattr(input_files, "SLICES", 10)
    monkeypatch.setattr(key_ranges, "BYTES_PER_RANGE", 4000)
    job = open_job(on_ray, StubReference())
    job.folder.prepare()
    job.work.prepare()
    preparation = preparation_of(job)
    preparation.ring.spool.prepare()
    actors = RayActors.of(on_ray.scoring, on_gpu=False).on_cores()
    for tasks in (EncodeTasks(preparation), ArrangeTasks(preparation)):
        rows = []
        actors.run(tasks, progress=NoProgress(), on_done=rows.append)
        assert len(rows) == len(tasks.sizes) > 2
        assert sum(rows) == 120
        assert all(map(tasks.is_committed, range(len(rows))))
    complete_ring(preparation.ring, preparation.num_ranges)
    run(replace(on_ray, scoring=replace(on_ray.scoring, executor="inline")))
    assert contents(on_ray.cache.output) == clean


def test_actors_killed_in_mid_unit_commit_each_unit_once(on_ray, clean, cluster):
    with Commits(on_ray.cache.output) as commits:
        made = child_on_ray(on_ray, reference=SlowReference())
        until(lambda: len(commits.files) >= 2)
        killed = cluster.actors()
        for actor in killed:
            actor.kill()
        made.join(PATIENCE)
    assert made.exitcode == 0
    assert killed
    assert len(commits.files) == UNITS
    assert {len(files) for files in commits.files.values()} == {1}
    assert contents(on_ray.cache.output) == clean


@pytest.mark.long
def test_a_driver_that_is_killed_leaves_its_work_to_any_executor(on_ray, config, clean):
    with Commits(on_ray.cache.output) as commits:
        stopped = child_on_ray(on_ray, reference=SlowReference())
        until(lambda: len(commits.files) >= 2)
        stopped.kill()
        stopped.join(PATIENCE)
    assert run(config, share=Share(1, 2)).whole is None
    assert run(config).tally.units < UNITS
    assert contents(config.cache.output) == clean


def test_what_an_actor_refuses_is_the_message_of_the_run(on_ray, tmp_path):
    stopped = child_on_ray(on_ray, reference=SlowReference(fails=True), stderr=tmp_path / "said")
    stopped.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert stopped.exitcode == UsageError.exit_code, said
    assert said == "This reference was told to refuse.\n"


def test_what_ray_raises_is_one_message(on_ray, tmp_path):
    """Its actors cannot be begun: they lack a module, as on machines without this align."""
    stopped = child_on_ray(on_ray, reference=FarReference(), stderr=tmp_path / "said")
    stopped.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert stopped.exitcode == ServerError.exit_code, said
    assert "--executor ray: Ray gave up (" in said
    assert "No module named 'far_away'" in said
    assert not re.search("Traceback|\x1b", said)


def test_a_cluster_that_cannot_be_joined_is_one_message(config, tmp_path):
    options = {"executor": "ray", "ray_address": "127.0.0.1:1"}
    nowhere = replace(config, scoring=replace(config.scoring, **options))
    stopped = child_on_ray(nowhere, stderr=tmp_path / "said")
    stopped.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert stopped.exitcode == ServerError.exit_code, said
    assert said.startswith("--ray-address 127.0.0.1:1: ")
    assert "Traceback" not in said


def test_a_real_model_gives_the_bytes_of_one_process(journey, cluster, tmp_path, monkeypatch):
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    words = ("precompute-ref", journey.folder / "data.parquet", "--output", tmp_path / "cache")
    words += ("--no-mlflow", "--executor", "ray", "--ray-address", cluster.address)
    made = launch(*words, "--ray-workers", 2, cwd=tmp_path)
    assert made.code == 0, made
    assert contents(tmp_path / "cache") == contents(journey.cache)
    usual = ("reading", "note: ", "sorting", "row ", "  ", "scoring")
    assert [line for line in made.err.splitlines() if not line.startswith(usual)] == []


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


@pytest.mark.parametrize(
    ("text", "workers"), [("", None), ("4", (4, 4)), ("1:8", (1, 8)), ("3:3", (3, 3))]
)
def test_workers_are_one_number_or_two(text, workers):
    assert workers_of(text) == workers


@pytest.mark.parametrize("text", ["0", "8:1", "0:4", ":", "1:", "two", "1:2:3", "-1:2"])
def test_other_words_for_workers_are_refused(text):
    with pytest.raises(UsageError, match="expected MIN:MAX or one number"):
        workers_of(text)
