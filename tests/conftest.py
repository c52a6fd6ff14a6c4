import os

import pytest

from align.stages.world.tokenizer import make_tokenizer

os.environ["OMP_NUM_THREADS"] = "1"  # two cores, and every process of a test wants both
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("ALIGN_MODEL", None)


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory, monkeypatch):
    """No test knows the caches of another."""
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    make_tokenizer(folder)
    return str(folder)
