"""Small data sets and the configs that make caches of them."""

import json
import shutil
from dataclasses import replace
from multiprocessing.forkserver import ensure_running

import pytest

from align.schemas.config import CacheOptions, Config, ModelOptions, TrackingOptions
from align.schemas.data_options import DataOptions, TokenOptions
from support import stub_hub
from support.mlflow_server import serving
from support.stage_one import contents, run
from support.trainings import KILLED
from support.worlds import make_data


def pytest_runtest_setup():
    """Begins what children of tests are forked from, which has imported stage 1.

    Who first asks for a child decides what that is, and it may be align, which imports less.
    """
    ensure_running()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"), rows=120)


@pytest.fixture
def config(data, tokenizer_folder, tmp_path):
    return config_of(data.paired, tokenizer_folder, tmp_path / "cache")


def config_of(path, tokenizer_folder, output, **data):
    return Config(
        model=ModelOptions(path=tokenizer_folder),
        data=DataOptions(files=[str(path)], **data),
        tokens=TokenOptions(max_length=256),
        cache=CacheOptions(output=str(output), shards=8, token_logps=True, reuse_known=False),
        tracking=TrackingOptions(mlflow=False),
    )


@pytest.fixture
def to(config):
    """The same config with another output folder or other settings of the cache."""

    def change(**cache):
        return replace(config, cache=replace(config.cache, **cache))

    return change


@pytest.fixture(scope="session")
def flawed_file(data, tmp_path_factory):
    """The same rows and one that cannot be used."""
    path = tmp_path_factory.mktemp("flawed") / "flawed.jsonl"
    bad = json.dumps({"prompt": "Why?", "chosen": "", "rejected": "no"})
    path.write_text(data.paired_jsonl.read_text() + bad + "\n")
    return path


@pytest.fixture
def flawed(flawed_file, tokenizer_folder, tmp_path):
    """The same config over data with one row that cannot be used."""
    return config_of(flawed_file, tokenizer_folder, tmp_path / "cache", max_bad_frac=0.5)


@pytest.fixture(scope="session")
def clean(data, tokenizer_folder, tmp_path_factory):
    """What one uninterrupted run of stage 1 leaves."""
    folder = tmp_path_factory.mktemp("clean") / "cache"
    run(config_of(data.paired, tokenizer_folder, folder))
    return contents(folder)


@pytest.fixture(scope="session")
def clean_of_flawed(flawed_file, tokenizer_folder, tmp_path_factory):
    """The same over data with one row that cannot be used."""
    folder = tmp_path_factory.mktemp("clean-of-flawed") / "cache"
    run(config_of(flawed_file, tokenizer_folder, folder, max_bad_frac=0.5))
    return contents(folder)


@pytest.fixture
def own_uri(new_store, tmp_path):
    """The address of a store of the test's own."""
    return new_store(tmp_path)


@pytest.fixture(scope="session")
def shared_mlflow_server(new_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    new_store(folder / "server.db")
    with serving(folder) as server:
        yield server


@pytest.fixture
def mlflow_server(shared_mlflow_server, no_mlflow_settings, monkeypatch):
    """A real one, in good order before and after each test; the machine may be busy."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    yield shared_mlflow_server
    shared_mlflow_server.mend()
    shared_mlflow_server.start()


@pytest.fixture
def hub():
    """An empty Hub on loopback."""
    with stub_hub.serving() as hub:
        yield hub


@pytest.fixture(scope="session")
def broken_off(course, tmp_path_factory):
    """A run that was killed in step 6, with checkpoints of steps 2 and 4."""
    run = tmp_path_factory.mktemp("broken") / "run"
    course.ends(KILLED, run, fault="before:update=kill@6")
    return run


@pytest.fixture
def broken_run(broken_off, tmp_path):
    """A copy of it, to go on with."""
    return shutil.copytree(broken_off, tmp_path / "run")
