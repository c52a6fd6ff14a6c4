import time
from types import SimpleNamespace

import pytest
import wandb
from tensorboard.summary.writer import event_file_writer

from align.stages.tracking import tensorboard_tracker, wandb_tracker
from align.stages.tracking.tracker import quiet
from support.wandb_runs import tear_down
from support.wandb_server import serving


@pytest.fixture(scope="session")
def wandb_imported(tmp_path_factory):
    """All that wandb imports for a run is imported, which each fork would do for itself."""
    settings = wandb.Settings(
        mode="offline", silent=True, console="off", root_dir=str(tmp_path_factory.mktemp("first"))
    )
    with quiet("wandb"):
        wandb.init(settings=settings).finish()
    tear_down()


@pytest.fixture
def quick_seconds(monkeypatch):
    """A second of TensorBoard, by which its files are named, takes 50 ms."""
    # From now on: a writer's thread may go on with the real clock after the test.
    start = time.time()
    clock = SimpleNamespace(time=lambda: start + 20 * (time.time() - start), sleep=time.sleep)
    for module in (tensorboard_tracker, event_file_writer):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def no_wandb_settings(wandb_imported, here, monkeypatch):
    """Nobody has set anything for wandb nor is logged in, and its service ends with the test."""
    monkeypatch.setattr(wandb_tracker, "FLUSH_SECONDS", 0.01)
    monkeypatch.setenv("NETRC", str(here / "netrc"))
    monkeypatch.setenv("HOME", str(here))
    names = "API_KEY BASE_URL DIR ENTITY ERROR_REPORTING MODE PROJECT SILENT"
    for name in names.split():
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    yield
    tear_down()


@pytest.fixture
def wandb_server(no_wandb_settings, tmp_path, monkeypatch):
    """A server of W&B that somebody is logged in to; wandb's files are in a folder of the test."""
    with serving(str(tmp_path / "run" / wandb_tracker.FOLDER)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
        yield server
